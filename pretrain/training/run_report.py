"""Records and prints the progress of a run: run directory, tracker, terminal.

Only rank 0 writes, except that the first rank of each machine sends MLflow the machine's metrics.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import torch.distributed as dist
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from data_pipeline.base.atomic import remove_leftovers, write_bytes, write_json
from data_pipeline.base.command import STOPPED
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.formatting import masked, masked_values
from data_pipeline.loading.stream import changes
from pretrain import models
from pretrain.config.run_config import MLFLOW_FILE, MlflowSection, RunConfig
from pretrain.engine.checkpoint import CONFIG
from pretrain.engine.checkpoint.directory import checkpoint_directory
from pretrain.engine.ranks import all_gather, on_rank_0
from pretrain.run import ARTIFACTS_DIRECTORY, environment, heartbeat, rank_logs, restarts, slurm, status, watchdog
from pretrain.run.environment import Machine
from pretrain.run.status import Status
from pretrain.training.prepare import PreparedRun
from pretrain.training.tracking.mlflow_store import NOTE, TrackedRun, one_line
from pretrain.training.tracking.tracker import Tracker, sample_machine

if TYPE_CHECKING:
    from pretrain.evaluate.hook import EvalResult


class RunReport:
    """Writes the run directory and feeds the tracker. `open` makes a report.

    Use it as a context manager: if an exception leaves the block, the tracker marks the run as failed.
    """

    def __init__(self, run: PreparedRun, stop_at_step: int | None, machines: list[Machine]):
        self.run, self._stop_at_step, self.machines = run, stop_at_step, machines
        self._tracker: Tracker | None = None
        self._held = contextlib.ExitStack()  # the lock of the run directory
        self._ended = threading.Event()

    @classmethod
    def open(cls, run: PreparedRun, stop_at_step: int | None) -> "RunReport":
        """The report of a run, whose directory rank 0 prepares and locks. All ranks call this together."""
        own = environment.this_machine(run.world.rank)
        report = cls(run, stop_at_step, environment.machines(all_gather(own, dict[str, Any])))
        on_rank_0(report._lock, None)
        report._sample_machine()
        watchdog.alive()
        return report

    def _lock(self) -> None:
        with _naming_directory(self.run.directory), contextlib.ExitStack() as held:
            attempt = _open_directory(self.run, self.machines, held)
            self._tracker = _tracker(self.run, attempt, self.machines)
            self._held = held.pop_all()

    def connects_to_mlflow(self) -> bool:
        """True if this process is making its first connection to MLflow, which takes processor time."""
        return self._tracker is not None and self._tracker.connects

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics of a step."""
        if self._tracker is not None and metrics:
            self._tracker.log(step, metrics)

    def record_result(self, step: int, result: "EvalResult") -> None:
        """Records the metrics of a hook after a step, and prints its lines."""
        self.record(step, result.metrics)
        for line in result.lines:
            self.say(f"step {step}  {line}{'; training continues' if result.failed else ''}")

    def say(self, line: str, stream: TextIO | None = None) -> None:
        """Prints a line on rank 0."""
        if self.run.world.rank == 0:
            with contextlib.suppress(OSError):  # a full disk under the log must not end the run
                print(line, file=stream, flush=True)

    def warn(self, line: str) -> None:
        self.say(f"warning: {line}", sys.stderr)

    def finish(self, step: int) -> int:
        """Records that the run has finished, or stopped on request, after `step` steps. All ranks call this.

        Returns the exit code: 0 or 75.
        """
        finished = step >= self.run.config.run.max_steps
        self._ended.set()
        dist.barrier()  # before MLflow, for which only rank 0 waits
        if self._tracker is not None:
            with _naming_directory(self.run.directory):
                self._end(self._tracker, step, finished)
        return 0 if finished else STOPPED

    def _end(self, tracker: Tracker, step: int, finished: bool) -> None:
        with watchdog.unwatched():
            if finished and self.run.config.tracking.mlflow:
                self._draw(self.run.directory / ARTIFACTS_DIRECTORY / "picture.png")
            tracker.close("FINISHED" if finished else "KILLED")
        directory = self.run.directory
        attempt, stop_file = status.read(directory).attempt, status.stop_requested(directory)
        status.clear_stop(directory)
        status.write(directory, Status("finished" if finished else "stopped", attempt, step, stop_file))
        if finished:
            self.say(f"finished {step} steps. Next: pretrain export {checkpoint_directory(directory, step)} OUT")
        else:
            there = self._stop_at_step is not None and step >= self._stop_at_step
            again = f"without --stop-at-step {self._stop_at_step}" if there else "again"
            self.say(f"stopped on request after step {step}; to resume, run the same command {again}")

    def _draw(self, target: Path) -> None:
        """Draws the picture of `pretrain picture`, for MLflow. An error in drawing doesn't fail the run."""
        from pretrain.training.picture import draw  # only a run that has ended needs it

        try:
            draw(self.run.directory, target)
        except UserError:
            pass  # nothing was evaluated
        except Exception as error:
            self.warn(f"{target}: not drawn: {one_line(error)}")

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            heartbeat.tell_failed(self.run.world.rank, error)  # now: MLflow may take its time
        self._ended.set()
        if kind is not None and self._tracker is not None:
            with watchdog.unwatched():
                self._tracker.close("FAILED")
        self._held.close()

    def _sample_machine(self) -> None:
        """On the first rank of each machine, has MLflow sample the machine."""
        mlflow, uri = self.run.config.tracking.mlflow, _mlflow_uri(self.run.config, self.machines)
        host = next((one["host"] for one in self.machines if one["ranks"][0] == self.run.world.rank), None)
        if mlflow and mlflow.log_system_metrics and uri and host:
            node = None if len(self.machines) == 1 else host
            arguments = (self.run.directory, uri, node, self._ended)
            threading.Thread(target=sample_machine, args=arguments, name="system-metrics", daemon=True).start()


@contextlib.contextmanager
def _naming_directory(directory: Path) -> Iterator[None]:
    """Turns an OSError into a FailedError that names the run directory."""
    try:
        yield
    except OSError as error:
        raise FailedError(f"run.directory: {directory}: {error.strerror}") from None


def _open_directory(run: PreparedRun, machines: list[Machine], held: contextlib.ExitStack) -> int:
    """Prepares the run directory and locks it until `held` is closed; returns the number of this attempt."""
    directory = run.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.directory: {directory} can't be created: {error.strerror}") from None
    held.enter_context(status.lock(directory, restarts.is_restart()))
    remove_leftovers(directory)
    supervised = rank_logs.supervised()
    attempt = rank_logs.attempt(supervised) if supervised else rank_logs.next_attempt(directory)
    config, resolved = directory / CONFIG, masked_values(run.config.model_dump(mode="json"))
    if config.exists() and (before := _settings_in(config)) != resolved:
        renamed = directory / f"config.before-attempt-{attempt}.yaml"
        if before is None:
            print(f"warning: {config}: not a valid run file; kept as {renamed.name}", flush=True)
        for change in changes(before, resolved) if before else []:
            print(f"changed since the last start: {masked(change)}", flush=True)
        config.rename(renamed)
    write_bytes(config, OmegaConf.to_yaml(OmegaConf.create(resolved)).encode())
    described = environment.describe(machines)
    write_json(directory / "environment.json", described)
    write_bytes(directory / environment.DIFF, described["git"]["diff"].encode())
    status.write(directory, Status("running", attempt))
    return attempt


def _settings_in(config: Path) -> Mapping[Any, object] | None:
    """The settings of the last start; None if the file isn't valid."""
    try:
        settings = OmegaConf.to_container(OmegaConf.load(config))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException):
        return None
    return settings if isinstance(settings, dict) else None


def _tracker(run: PreparedRun, attempt: int, machines: list[Machine]) -> Tracker:
    config = run.config
    mlflow, parameters = config.tracking.mlflow, models.meta_model(run.model).num_parameters()
    corpora = {f"train.{number}": corpus for number, corpus in enumerate(run.training)}
    corpora |= {f"validation.{number}": corpus for number, corpus in enumerate(run.validation.values())}
    tracked = TrackedRun(
        experiment=(mlflow or MlflowSection()).experiment,
        run_name=config.run.name,
        attempt=attempt,
        parameters={**config.model_dump(mode="json"), "parameters": parameters},
        tags={
            **environment.git_tags(),
            "host": machines[0]["host"],
            "ranks": str(run.world.size),
            "zero_stage": str(config.zero_stage),
            "precision": config.precision,
            **{f"data.{place}.fingerprint": corpus.fingerprint for place, corpus in corpora.items()},
            NOTE: _description(run, parameters),
        },
    )
    uri = _mlflow_uri(config, machines)
    if mlflow and not uri:
        print("MLflow: off, since nodes share the disk; set tracking.mlflow.uri to a server", flush=True)
    return Tracker(run.directory, tracked, uri)


def _mlflow_uri(config: RunConfig, machines: list[Machine]) -> str | None:
    """The URI of the run's MLflow; None if it has none."""
    if not (mlflow := config.tracking.mlflow):
        return None
    return mlflow.uri or (None if slurm.disk_is_shared(len(machines)) else MLFLOW_FILE)


def _description(run: PreparedRun, parameters: int) -> str:
    """A description of the run in Markdown, for its page in MLflow."""
    config = run.config
    corpora = " and ".join(f"{corpus.name} ({corpus.rows('train'):,} rows)" for corpus in run.training)
    objective = run.training[0].objective.name
    steps = f"{config.run.max_steps:,} steps of {config.batch.global_batch_size:,} rows"
    return (
        f"A `{run.model.family}` model of {parameters:,} parameters learns `{objective}` on {corpora}: {steps}, "
        f"{config.optimizer.name}, {config.precision}, seed {config.run.seed}. It is in `{config.run.directory}`.\n\n"
        "Curves: tab *Model metrics*. Tab *Artifacts*: `evaluation/samples.json`, what the model writes, "
        "pictures of hooks, and once the run has ended `picture.png`, its held-out loss."
    )
