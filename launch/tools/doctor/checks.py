"""The checks of one machine by name, each in a process of its own: one that hangs is killed and named.

Only this module's process imports what a check needs. It ends by itself at its time limit, even where it waits for a
dead file system or its parent is gone.
"""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.foundation.progress import counted, in_time
from launch.tools.doctor.findings import Finding

if TYPE_CHECKING:
    from pretrain.trainer.validate import ValidatedRun

_LONG = 2 * 86400.0  # s
_LAST = 200  # characters of a check's own error


@dataclass(frozen=True)
class Settings:
    """What the checks of one machine need to know.

    `ranks` are the machine's (None: one for each GPU, or one), `all_ranks` the whole run's. `locked` is a file that the
    head holds locked beside the run directory. `run_file` is the file and its overrides.
    """

    ranks: int | None = None
    all_ranks: int = 1
    workers: int = 2
    directory: str | None = None
    locked: str | None = None
    tracking: str | None = None
    run_file: tuple[str, ...] = ()

    @property
    def ranks_here(self) -> int:
        from pretrain.run.hardware import count_gpus

        return self.ranks or count_gpus() or 1


@dataclass(frozen=True)
class Check:
    """A check, the seconds that it may take, and how it is named where it takes longer."""

    seconds: float
    run: Callable[[Settings], list[Finding]]
    name: str


def _versions(settings: Settings) -> list[Finding]:
    from launch.tools.doctor.versions import versions

    return versions()


def _gpus(settings: Settings) -> list[Finding]:
    from launch.tools.doctor.gpus import gpus

    return gpus(settings.ranks)


def _memory(settings: Settings) -> list[Finding]:
    from launch.tools.doctor import memory

    given = settings.ranks_here, settings.workers
    return memory.memory(*given) + memory.shared_memory(*given)


def _directory(settings: Settings) -> list[Finding]:
    from launch.tools.doctor.directory import directory

    if settings.directory is None:
        return []
    return directory(Path(settings.directory), Path(settings.locked) if settings.locked else None)


def _tracking(settings: Settings) -> list[Finding]:
    from launch.tools.doctor.tracking import tracking

    return tracking(settings.tracking) if settings.run_file else []


def _run_file(settings: Settings) -> list[Finding]:
    from data_pipeline.foundation.config_file import load
    from data_pipeline.foundation.errors import UserError
    from pretrain.checkpoint.choose import newest
    from pretrain.config import RunConfig
    from pretrain.run import lock
    from pretrain.run.hardware import count_gpus
    from pretrain.trainer.validate import validate

    path, *overrides = settings.run_file
    try:
        config = load(path, overrides, RunConfig)
        directory = Path(config.run.directory)
        lock.check(directory)
        setup = validate(config, 0, settings.all_ranks, newest(directory), ranks_are_here=False)
    except UserError as error:
        return [Finding("run file", "fault", line) for line in str(error).splitlines()]
    ranks = counted(settings.all_ranks, "rank")
    found = [Finding("run file", "ok", f"{path}, its corpora and {ranks} go together")]
    found += [Finding("run file", "warning", line) for line in setup.warnings]
    return found if count_gpus() else [*found, _time(setup, settings)]


def _time(setup: "ValidatedRun", settings: Settings) -> Finding:
    """How long the run takes on the CPUs of machines like this one."""
    from pretrain.run import cpu_speed as cpu

    here = settings.ranks_here
    machines = max(1, settings.all_ranks // here)
    left = cpu.seconds_left(setup.config, setup.model, setup.lengths, setup.train_state.step, here) / machines
    share = f"{cpu.share(setup.model.width):.0%} of {cpu.product_flops() / 1e9:,.0f} GFLOP/s"
    found = f"about {in_time(left)} to step {setup.config.run.max_steps:,} without a GPU ({share})"
    if left < _LONG:
        return Finding("time", "ok", found)
    remedy = "take a smaller model, as launch init chooses one, fewer steps, or GPUs"
    return Finding("time", "warning", found, "", remedy)


CHECKS = {
    "versions": Check(60, _versions, "versions"),
    "gpus": Check(60, _gpus, "GPUs"),
    "memory": Check(60, _memory, "memory"),
    "directory": Check(90, _directory, "run directory"),
    "tracking": Check(60, _tracking, "tracking"),
    "run_file": Check(300, _run_file, "run file"),
}
OF_A_NODE = ("versions", "gpus", "memory", "directory", "tracking")


def checked(names: Sequence[str], settings: Settings, seconds: float | None = None) -> Iterator[Finding]:
    """The findings of all checks `names`, which run at the same time. `seconds` replaces their time limits."""
    given = json.dumps(dataclasses.asdict(settings))
    begun = time.monotonic()
    started = []
    for name in names:
        limit = seconds or CHECKS[name].seconds
        command = [sys.executable, "-P", "-m", "launch.tools.doctor.checks", name, str(limit)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        assert process.stdin
        process.stdin.write(given)
        process.stdin.close()
        process.stdin = None
        started.append((name, process, limit))
    for name, process, limit in started:
        yield from _findings(CHECKS[name].name, process, limit, max(0.1, begun + limit - time.monotonic()))


def _findings(check: str, process: "subprocess.Popen[str]", limit: float, left: float) -> list[Finding]:
    late = Finding(
        check, "fault", f"no answer within {limit:g} s", "", "see what it waits for: a file system, a driver"
    )
    try:
        out, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        process.kill()  # without waiting for it: a process that waits for a dead file system can't end
        return [late]
    if process.returncode == -signal.SIGALRM:
        return [late]
    if process.returncode:
        said = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:_LAST]
        return [Finding(check, "fault", f"the check failed: {said}")]
    return [Finding(**finding) for finding in json.loads(out)]


def main() -> None:
    name, limit = sys.argv[1:]
    signal.setitimer(signal.ITIMER_REAL, float(limit))
    given = json.loads(sys.stdin.read())
    settings = Settings(**{**given, "run_file": tuple(given["run_file"])})
    print(json.dumps([dataclasses.asdict(finding) for finding in CHECKS[name].run(settings)]))


if __name__ == "__main__":
    main()
