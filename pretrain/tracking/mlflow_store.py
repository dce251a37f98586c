"""MLflow's store, a server or a sqlite file: its client, the names that it takes, a run as it has it, and its server.

Two files in a run's directory say what MLflow has; feeder.py lists them with the others.
"""

import contextlib
import logging
import os
import re
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import NonNegativeInt

from data_pipeline.foundation.atomic import temporary_path, write_json
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import MASK, masked, without_login
from data_pipeline.foundation.json_file import read_valid_json
from data_pipeline.foundation.lazy_imports import imported_at_first_use

with imported_at_first_use():
    from mlflow import tracking  # 3.8 s and 170 MB, and many who need this module need no client

ARTIFACTS_DIRECTORY = "artifacts"
DIGEST_LENGTH = 36  # of a dataset: MLflow's limit
_PARENT = "parent_of_runs"  # the tag that tells a parent from a training run of the same name
NOTE = "mlflow.note.content"  # the tag that MLflow shows as the description, in Markdown
# retries are the feeder's own; MLflow's would hold a closing run for minutes
_FAIL_FAST = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_KEY_LENGTH = 250  # MLflow's limit (mlflow/utils/validation.py)
ARTIFACTS = "mlartifacts"  # the folder beside a sqlite file
# MLflow's page of a run sorts its sections by name, and a section is all of a name before its last slash: losses come
# first, then evaluations, and seconds and sizes last. The first pattern that fits a name of metrics.jsonl counts.
_NAMES = [
    (r"train/loss", "loss/train"),
    (r"train/(\w+_loss|cross_entropy)", r"loss/train.\1"),
    (r"validation/(.+)/loss", r"loss/validation.\1"),
    (r"validation/(.+)/(\w+_loss|unigram_entropy)", r"loss/validation.\1.\2"),
    (r"validation/(.+)/(\w+)", r"metrics/\1.\2"),
    (r"evaluation/(.+)/seconds", r"usage/evaluation.\1.seconds"),
    (r"checkpoint/(\w+)", r"usage/checkpoint.\1"),
    (r"stragglers/(\w+)", r"usage/stragglers.\1"),
    (r"train/(peak_memory_gigabytes)", r"usage/\1"),
    (r"((?:train|system)/.+)", r"\1"),
    (r"((?:embedding|norms)/.+)", r"model/\1"),
    (r"(.+/.+)", r"metrics/\1"),
]


@dataclass(frozen=True)
class DatasetInfo:
    """A corpus as MLflow shows it.

    `digest` is the manifest's fingerprint, `context` is train or validation, and `profile` has further facts (rows,
    tokens).
    """

    name: str
    digest: str
    source: str
    context: str
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def in_mlflow(self) -> dict[str, str]:
        """Name and digest: MLflow keeps one input of each pair, and a corpus may be both trained and validated on."""
        return {"name": f"{self.name} ({self.context})", "digest": self.digest[:DIGEST_LENGTH]}


class Kept:
    """What a JSON file of the run directory says."""

    file: ClassVar[str]

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / self.file, self)

    @classmethod
    def load(cls, run_dir: Path) -> Self | None:
        return read_valid_json(run_dir / cls.file, cls)


@dataclass
class TrackedRun(Kept):
    """The description of a run for MLflow.

    `parameters` is the resolved run file, `tags` what else names the run, `artifacts` files by their paths in the run
    directory, and `parent` the name of the run that MLflow shows it under. `key` finds the run in MLflow again if
    mlflow.json is lost.
    """

    file = "tracking.json"

    experiment: str
    run_name: str
    attempt: int
    uri: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[DatasetInfo] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)
    parent: str | None = None
    status: str = "RUNNING"
    started: float = field(default_factory=time.time)
    ended: float | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class FeedState(Kept):
    """The part of a run that MLflow has.

    `offsets`: bytes of each file of metrics, by its path in the run directory. `files`: [mtime_ns, bytes] of each
    upload, and of the index of each checkpoint. `models`: the model of a checkpoint, by the name of its directory.
    """

    file = "mlflow.json"

    tracking_uri: str
    experiment_id: str
    run_id: str
    offsets: dict[str, NonNegativeInt] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MlflowRun:
    """A run with MLflow's client and what MLflow has of it. `parent`: the id of the run that it stands below."""

    client: "tracking.MlflowClient"
    directory: Path
    description: TrackedRun
    state: FeedState
    parent: str | None

    def save(self) -> None:
        self.state.save(self.directory)


def file_version(file: Path) -> list[int]:
    """[mtime_ns, bytes], by which a changed file is recognised. Raises FileNotFoundError."""
    stat = file.stat()
    return [stat.st_mtime_ns, stat.st_size]


def parent_run(client: "tracking.MlflowClient", experiment_id: str, name: str) -> str:
    """The id of the parent run `name`, which is created, and ended at once, if it doesn't exist.

    Runs that start together may each create one. All of them then take the oldest, and the others are deleted.
    """
    tag = name.replace("'", "_")  # so that a filter can hold it
    found = _parents(client, experiment_id, tag)
    if not found:
        created = client.create_run(experiment_id, tags={_PARENT: tag}, run_name=name).info.run_id
        client.set_terminated(created)
        found = _parents(client, experiment_id, tag)
        if found[0].info.run_id != created:
            client.delete_run(created)
    return found[0].info.run_id


def _parents(client: "tracking.MlflowClient", experiment_id: str, tag: str) -> list[Any]:
    """The parent runs with the value `tag`, the oldest first."""
    runs = client.search_runs([experiment_id], f"tags.{_PARENT} = '{tag}'")
    return sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))


def client(uri: str) -> "tracking.MlflowClient":
    """An MLflow client."""
    kind = tracking.MlflowClient  # imports MLflow, which sets the level of its logger
    for name, value in _FAIL_FAST.items():
        os.environ.setdefault(name, value)
    # errors are raised and reported in one line; MLflow's own logger would add pages of traceback
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    return kind(tracking_uri=uri)


def create_tables(uri: str) -> None:
    """Creates the tables of a new sqlite file, in another file, which then gets the name.

    If a process is killed while MLflow creates them, MLflow would find some, and never create the rest.
    """
    database = sqlite_file(uri)
    if database is None or database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    new = temporary_path(database)
    client(f"sqlite:///{new}").search_experiments(max_results=1)
    with contextlib.suppress(FileExistsError):  # of runs that start together, the first one's stays
        database.hardlink_to(new)
    new.unlink()


def absolute_uri(uri: str) -> str:
    """`uri`; the path of a sqlite file becomes absolute, so that it doesn't depend on the working directory."""
    file = sqlite_file(uri)
    return f"sqlite:///{file}" if file else uri


def with_password(recorded: str, given: str | None = None) -> str:
    """`recorded`, a URI without its password, or `given`, the same with it. Raises UserError if there is only ***."""
    if MASK not in recorded:
        return recorded
    if given is None or masked(given) != recorded:
        raise UserError(f"the password of {recorded} isn't recorded; give --uri with it")
    return given


def sqlite_file(uri: str) -> Path | None:
    """The file of `sqlite:///relative` or `sqlite:////absolute`; None for any other uri."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).absolute() if uri.startswith(prefix) else None


def safe_key(name: str) -> str:
    """`name` without what MLflow refuses: unusual characters, empty or dotted parts of a path, excess length."""
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_KEY_LENGTH].rstrip("/") or "_"


def in_mlflow(name: str) -> str:
    """The name in MLflow of a metric of metrics.jsonl: "validation/c4/loss" -> "loss/validation.c4"."""
    for pattern, replacement in _NAMES:
        if found := re.fullmatch(pattern, name):
            return safe_key(found.expand(replacement))
    return safe_key(name)


def one_line(error: Exception) -> str:
    """The first line of the message: MLflow's messages continue with SQL statements and stacks."""
    return masked((str(error).strip().splitlines() or [type(error).__name__])[0][:300])


_HOST = "127.0.0.1"
_TRAINING = "?workflowType=machine_learning"  # otherwise the UI shows a run as the evaluation of a chat application


def dashboard(run_dir: Path | None, given: str, port: int = 5000) -> None:
    """Prints the address of the charts, and replaces this process by MLflow's server, which serves until Ctrl-C.

    With `run_dir` they are the charts of that run in the run's own MLflow, of which the URI `given` may add the
    password; otherwise it is the list of experiments. If MLflow already runs as a server, it only prints the address.
    Raises UserError if there is nothing to show.
    """
    state = FeedState.load(run_dir) if run_dir else None
    if run_dir and state is None:
        raise UserError(
            f"{run_dir}: no {FeedState.file} here, so MLflow has no data of it; to send them: pretrain sync {run_dir}"
        )
    uri = state.tracking_uri if state else absolute_uri(given)
    runs = f"#/experiments/{state.experiment_id}/runs" if state else "#/experiments"
    page = (f"{runs}/{state.run_id}/model-metrics" if state else runs) + _TRAINING
    if uri.startswith(("http://", "https://")):
        print(f"{without_login(uri).rstrip('/')}/{page}")
        return
    uri = with_password(uri, given)
    database = sqlite_file(uri)
    if database and not database.exists():
        raise UserError(f"{database}: no such file, so there is nothing to show yet; runs create it when they train")
    address = f"http://{_HOST}:{(port := _free_port(port))}"
    print(f"{address}/{page}")
    if state:
        print(f"with the experiment's other runs: {address}/{runs}{_TRAINING}&compareRunsMode=CHART")
    print("MLflow starts, which takes some seconds. Ctrl-C ends it.", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", "--log-level warning"]
    if database:
        command += ["--default-artifact-root", (database.parent / ARTIFACTS).as_uri()]
    # one process that serves pages: MLflow's job runners are for evaluating language-model applications
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_LOGGING_LEVEL": "WARNING"}
    environment |= {"MLFLOW_BACKEND_STORE_URI": uri}  # a command line is public, and the URI may have a password
    os.execve(sys.executable, command, environment)


def _free_port(port: int) -> int:
    """`port`, or a free one if something listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT counts as free
        try:
            probe.bind((_HOST, port))
        except OSError:
            probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
