"""The checks of one machine by name, and the program that runs one of them for a doctor.

Each check is a module of this folder with a function `check`. Its process imports only what that check needs, and ends
by itself at its time limit, even where it waits for a dead file system or its parent is gone.
"""

import importlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from launch.rank_processes import PROGRAM_REPORT
from launch.tools.doctor.findings import REQUEST, Finding, Settings
from launch.tools.doctor.versions import installed_versions

_LONGEST_LINE = 200  # characters of a check's own error


@dataclass(frozen=True)
class Check:
    """How findings name a check, and the seconds that it may take."""

    title: str
    seconds: float


NODE_CHECKS = {
    "versions": Check("versions", 60),
    "gpus": Check("GPUs", 60),
    "memory": Check("memory", 60),
    "directory": Check("run directory", 90),
    "tracking": Check("tracking", 60),
}
RUN_CHECKS = {"run_file": Check("run file", 300)}  # once for all nodes


def request(name: str, check: Check, settings: Settings) -> dict[str, str]:
    """The environment that asks this program for a check."""
    return {REQUEST: json.dumps({"name": name, "seconds": check.seconds, "settings": asdict(settings)})}


def failure(check: Check, code: int, last_lines: Sequence[str]) -> Finding:
    """The finding for a check that ended with an exit code other than 0."""
    if code == -signal.SIGALRM:
        remedy = "see what it waits for: a file system, a driver"
        return Finding(check.title, "fault", f"no answer within {check.seconds:g} s", "", remedy)
    error = last_lines[-1] if last_lines else f"exit code {code}"
    return Finding(check.title, "fault", f"the check failed: {error[:_LONGEST_LINE]}")


def main() -> None:
    given = json.loads(os.environ[REQUEST])
    signal.setitimer(signal.ITIMER_REAL, given["seconds"])
    module = importlib.import_module(f"launch.tools.doctor.{given['name']}")
    findings = [asdict(finding) for finding in module.check(Settings(**given["settings"]))]
    report = {"clock": time.time(), "findings": findings, "versions": installed_versions()}
    print(PROGRAM_REPORT, json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
