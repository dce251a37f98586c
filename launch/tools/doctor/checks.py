"""The checks of one machine by name, each in a process of its own: one that hangs is killed and named.

As a program, `python -m launch.tools.doctor.checks`, it runs all checks of a node for a doctor; with a check's name and
its time limit, that check alone. Only such a process imports what the check needs. It ends by itself at its time limit,
even where it waits for a dead file system or its parent is gone.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.foundation.formatting import counted, duration
from data_pipeline.foundation.processes import ProcessGroup
from launch.rank_processes import PROGRAM_REPORT
from launch.tools.doctor.findings import Finding

if TYPE_CHECKING:
    from pretrain.trainer.validate import ValidatedRun

REQUEST = "LAUNCH_DOCTOR_REQUEST"  # in the environment of the doctor's programs: what they are asked for, as JSON
_LONG = 2 * 86400.0  # s
_LAST_LINES = 20
_LONGEST_LINE = 200  # characters of a check's own error


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


# Each check imports what it needs itself: its process starts faster, and an import that fails is one check's fault.


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
    from pretrain.config import RunConfig
    from pretrain.run.hardware import count_gpus
    from pretrain.trainer.preflight import preflight

    path, *overrides = settings.run_file
    try:
        setup = preflight(load(path, overrides, RunConfig), settings.all_ranks, here=False)
    except UserError as error:
        return [Finding("run file", "fault", line) for line in str(error).splitlines()]
    ranks = counted(settings.all_ranks, "rank")
    found = [Finding("run file", "ok", f"{path} and its corpora are valid for {ranks}")]
    found += [Finding("run file", "warning", line) for line in setup.warnings]
    return found if count_gpus() else [*found, _time(setup, settings)]


def _time(setup: "ValidatedRun", settings: Settings) -> Finding:
    """How long the run takes on the CPUs of machines like this one."""
    from pretrain.run import cpu_speed as cpu

    here = settings.ranks_here
    machines = max(1, settings.all_ranks // here)
    left = cpu.seconds_left(setup.config, setup.model, setup.lengths, setup.train_state.step, here) / machines
    share = f"{cpu.share(setup.model.width):.0%} of {cpu.product_flops() / 1e9:,.0f} GFLOP/s"
    found = f"about {duration(left)} to step {setup.config.run.max_steps:,} without a GPU ({share})"
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
NODE_CHECKS = ("versions", "gpus", "memory", "directory", "tracking")


def checked(names: Sequence[str], settings: Settings, seconds: float | None = None) -> Iterator[Finding]:
    """The findings of all checks `names`, which run at the same time. `seconds` replaces their time limits."""
    started = time.monotonic()
    environment = {**os.environ, REQUEST: json.dumps(asdict(settings))}
    with ProcessGroup(seconds_to_end=0) as group:
        processes = {}
        for name in names:
            limit = seconds or CHECKS[name].seconds
            command = [sys.executable, "-P", "-m", "launch.tools.doctor.checks", name, str(limit)]
            processes[name] = group.start(command, environment, output="file", tied=True), limit
        for name, (process, limit) in processes.items():
            check = CHECKS[name].name
            code = process.wait(max(0.1, started + limit - time.monotonic()))
            lines = process.last_lines(_LAST_LINES)
            if code in (None, -signal.SIGALRM):
                remedy = "see what it waits for: a file system, a driver"
                yield Finding(check, "fault", f"no answer within {limit:g} s", "", remedy)
            elif code:
                said = (lines or [f"exit code {code}"])[-1][:_LONGEST_LINE]
                yield Finding(check, "fault", f"the check failed: {said}")
            else:
                yield from (Finding(**finding) for finding in json.loads(lines[-1]))


def main() -> None:
    given = json.loads(os.environ[REQUEST])
    settings = Settings(**{**given, "run_file": tuple(given["run_file"])})
    if sys.argv[1:]:
        name, limit = sys.argv[1:]
        signal.setitimer(signal.ITIMER_REAL, float(limit))
        print("\n" + json.dumps([asdict(finding) for finding in CHECKS[name].run(settings)]))
        return
    from launch.tools.doctor.versions import installed_versions

    _report(versions=installed_versions())
    for finding in checked(NODE_CHECKS, settings):
        _report(finding={key: value for key, value in asdict(finding).items() if key != "node"})


def _report(**what: Any) -> None:
    print(PROGRAM_REPORT, json.dumps({"clock": time.time(), **what}), flush=True)


if __name__ == "__main__":
    main()
