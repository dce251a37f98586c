"""Records and prints the progress of a run: run directory, tracker and console.

Only rank 0 writes, except that the first rank of each machine records the machine's metrics.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import torch.distributed as dist
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from data_pipeline.foundation.atomic import remove_leftovers, write_bytes, write_json
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import counted, duration, human_size
from data_pipeline.foundation.secrets import masked, masked_values
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.stream import changes
from pretrain import models
from pretrain.checkpoint import CONFIG
from pretrain.checkpoint.directory import checkpoint_directory
from pretrain.config.run_config import MlflowSection
from pretrain.evaluation.hook import Findings
from pretrain.run import environment, outcome, rank_logs, status, watchdog
from pretrain.run.environment import Machine
from pretrain.run.status import Status
from pretrain.run.system_metrics import SystemMonitor
from pretrain.tracking.mlflow_run import ARTIFACTS_DIRECTORY, NOTE, DatasetInfo, TrackedRun
from pretrain.tracking.store import one_line
from pretrain.tracking.tracker import Tracker
from pretrain.trainer.picture import draw
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.ranks import on_rank_0

if TYPE_CHECKING:
    from pretrain.checkpoint.save import Saved

_LONG = 3600.0  # s
_QUICK = 100_000_000  # parameters: larger models take long to read again for a picture of their attention


class RunReport:
    """Keeps a run's directory and tracker. All ranks create one together.

    As a context manager it marks the run as failed in the tracker when an exception leaves the block.
    """

    def __init__(self, run: ValidatedRun):
        self.run = run
        self._tracker: Tracker | None = None
        self.machines = environment.machines()
        attempt = on_rank_0(lambda: self._open(self.machines))
        self._monitor = _system_monitor(run, self.machines, attempt)
        watchdog.alive()

    def _open(self, machines: list[Machine]) -> int:
        with _naming_directory(self.run.directory):
            attempt, self._lock = _open_directory(self.run, machines)
            self._tracker = _tracker(self.run, attempt)
        return attempt

    def connects_to_mlflow(self) -> bool:
        """True if this rank's processor also makes the first connection to MLflow now."""
        return self._tracker is not None and self._tracker.connects

    def announce(self, parameters: int, layout: BatchLayout) -> None:
        config = self.run.config
        self._print(
            f"{config.run.name}: {parameters:,} parameters, {config.precision}, ZeRO-{config.zero_stage}, "
            f"{counted(layout.ranks, 'rank')} × {layout.accumulation} × {layout.micro_batch} rows, "
            f"steps {self.run.train_state.step} to {config.run.max_steps}"
        )
        if self.run.initial_weights and not self.run.resume:
            self._print(f"starts from the weights in {self.run.initial_weights}")
        if config.data.mixing or config.data.weights_of == "tokens":
            shares = ", ".join(f"{100 * share:.3g} % of {name}" for name, share in self.run.shares.items())
            self._print(f"a mixture, in rows: {shares}")
        for line in self.run.warnings:
            self.warn(line)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of a step and prints the most important ones."""
        if self._tracker is None:
            return
        self._tracker.log(step, metrics)
        steps = self.run.config.run.max_steps
        if "train/loss" in metrics:
            self._print(
                f"step {step}/{steps}  loss {metrics['train/loss']:.4f}  lr {metrics['train/learning_rate']:.2e}  "
                f"norm {metrics['train/gradient_norm']:.3f}  {_skipped_and_speed(metrics, steps - step)}".rstrip()
            )

    def forecast(self, step: int, seconds: float) -> None:
        """Prints when a long run will end if each step takes `seconds`; the first logged step may be hours away."""
        left = (self.run.config.run.max_steps - step) * seconds
        if left >= _LONG:
            end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left))
            self._print(f"a step takes {seconds:.3g} s: {duration(left)} left, until about {end}")

    def record_findings(self, step: int, findings: Findings) -> None:
        """Records the metrics that a hook has found after a step and prints its lines."""
        if self._tracker is not None and findings.metrics:
            self._tracker.log(step, findings.metrics)
        for line in findings.lines:
            self._print(f"step {step}  {line}{'; training goes on' if findings.failed else ''}")

    def saved(self, saved: "Saved") -> None:
        if self._tracker is None:
            return
        times = {
            "pause_seconds": saved.pause_seconds,
            "write_seconds": saved.write_seconds,
            "write_cpu_seconds": saved.write_cpu_seconds,
            "gigabytes": saved.gigabytes,
        }
        self._tracker.log(saved.step, {f"checkpoint/{name}": value for name, value in times.items()})
        self._print(
            f"saved {saved.directory}: {human_size(saved.gigabytes * 1e9)} in {saved.write_seconds:.2f} s "
            f"({saved.write_cpu_seconds:.2f} s of processor time); training paused for {saved.pause_seconds:.2f} s"
        )
        for line in saved.warnings:
            self.warn(line)

    def warn(self, line: str) -> None:
        self._print(f"warning: {line}", sys.stderr)

    def finish(self, step: int, finished: bool) -> None:
        """Records that the run has `finished`, or stopped on request, after `step` steps. All ranks call it."""
        self._end_monitor()
        dist.barrier()  # before MLflow, for which only rank 0 waits
        if self._tracker is not None:
            with _naming_directory(self.run.directory):
                self._end(self._tracker, step, finished)

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
            self._print(f"finished {step} steps. Next: pretrain export {checkpoint_directory(directory, step)} OUT")
        else:
            self._print(f"stopped on request after step {step}; to resume, run the same command again")

    def _draw(self, target: Path) -> None:
        """Draws what `pretrain picture` does, for MLflow. A picture that fails must not fail the run."""
        quick = models.outline(self.run.model).num_parameters() <= _QUICK
        try:
            draw(self.run.directory, target, attention=quick)
        except UserError:
            pass  # nothing was evaluated
        except Exception as error:
            self.warn(f"{target}: not drawn: {one_line(error)}")

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            outcome.failed(self.run.rank, error)  # now: MLflow may take its time
        self._end_monitor()
        if kind is not None and self._tracker is not None:
            with watchdog.unwatched():
                self._tracker.close("FAILED")

    def _end_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.close()

    def _print(self, line: str, stream: TextIO | None = None) -> None:
        if self.run.rank == 0:
            with contextlib.suppress(OSError):  # a full disk under the log must not end the run
                print(line, file=stream, flush=True)


@contextlib.contextmanager
def _naming_directory(directory: Path) -> Iterator[None]:
    """Turns an OSError into a FailedError that names the run directory."""
    try:
        yield
    except OSError as error:
        raise FailedError(f"run.directory: {directory}: {error.strerror}") from None


def _skipped_and_speed(metrics: dict[str, float], steps: int) -> str:
    """The parts that are left out where nobody measures them. `steps` are left."""
    skipped = f"{number:.0f} skipped  " if (number := metrics.get("train/skipped_steps")) else ""
    if "train/steps_per_second" not in metrics:
        return skipped
    left = duration(steps / metrics["train/steps_per_second"])
    return f"{metrics['train/tokens_per_second']:,.0f} tokens/s  {skipped}{left} left"


def _open_directory(run: ValidatedRun, machines: list[Machine]) -> tuple[int, TextIO]:
    """Prepares the run directory; returns the number of this attempt and the directory's lock."""
    directory = run.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.directory: {directory} can't be created: {error.strerror}") from None
    locked = status.lock(directory)
    remove_leftovers(directory)
    supervised = rank_logs.supervised()
    if not supervised:  # a supervisor clears it before it accepts requests itself
        status.clear_stop(directory)  # left from an earlier attempt
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
    write_json(directory / "environment.json", environment.describe(machines))
    write_bytes(directory / environment.DIFF, environment.git_diff().encode())
    status.write(directory, Status("running", attempt))
    return attempt, locked


def _settings_in(config: Path) -> Mapping[Any, object] | None:
    """The settings of the last start; None if the file isn't valid."""
    try:
        settings = OmegaConf.to_container(OmegaConf.load(config))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException):
        return None
    return settings if isinstance(settings, dict) else None


def _tracker(run: ValidatedRun, attempt: int) -> Tracker:
    config = run.config
    mlflow, parameters = config.tracking.mlflow, models.outline(run.model).num_parameters()
    uses = [("train", corpus.name, corpus) for corpus in run.training]
    uses += [("validation", name, corpus) for name, corpus in run.validation.items()]
    tracked = TrackedRun(
        experiment=(mlflow or MlflowSection()).experiment,
        run_name=config.run.name,
        attempt=attempt,
        parameters={**config.model_dump(mode="json"), "parameters": parameters},
        tags={
            **environment.git_tags(),
            "ranks": str(run.ranks),
            "zero_stage": str(config.zero_stage),
            "precision": config.precision,
            NOTE: _description(run, parameters),
        },
        datasets=[
            DatasetInfo(
                name=name,
                digest=corpus.fingerprint,
                source=str(corpus.directory / "manifest.json"),
                context=split,
                profile={key: getattr(corpus.manifest.splits[split], key) for key in ("rows", "tokens", "documents")},
            )
            for split, name, corpus in uses
        ],
        artifacts=[CONFIG, "environment.json", environment.DIFF],
        parent=mlflow.parent if mlflow else None,
    )
    return Tracker(run.directory, tracked, mlflow.uri if mlflow else None)


def _description(run: ValidatedRun, parameters: int) -> str:
    """The run in a few words of Markdown, for MLflow's page of it."""
    config = run.config
    corpora = " and ".join(f"{corpus.name} ({corpus.rows('train'):,} rows)" for corpus in run.training)
    objective = run.training[0].objective.name
    steps = f"{config.run.max_steps:,} steps of {config.batch.global_batch_size:,} rows"
    return (
        f"A `{run.model.family}` model of {parameters:,} parameters learns `{objective}` on {corpora}: {steps}, "
        f"{config.optimizer.name}, {config.precision}, seed {config.run.seed}. It is in `{config.run.directory}`.\n\n"
        "Curves and pictures: tab *Model metrics*, losses first. Tab *Artifacts*: `evaluation/samples.json`, what the "
        "model writes, and once the run has ended `picture.png`, its held-out loss and what the decoder attends to."
    )


def _system_monitor(run: ValidatedRun, machines: list[Machine], attempt: int) -> SystemMonitor | None:
    """The monitor of this machine, on its first rank."""
    seconds = run.config.tracking.system_metrics_seconds
    host = next((one["host"] for one in machines if one["ranks"][0] == run.rank), None)
    if seconds is None or host is None:
        return None
    with _naming_directory(run.directory):
        return SystemMonitor(run.directory, attempt, host, len(machines) == 1, seconds)
