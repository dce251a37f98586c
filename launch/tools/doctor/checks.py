"""The checks of `launch doctor`: their settings and findings, and the program that runs one check.

A check is a function in this folder, from settings to findings. Its process imports only what the check needs. The
process ends at its time limit, even if it waits for a dead file system or its parent is gone.
"""

import json
import os
import pkgutil
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]
_REQUEST = "LAUNCH_DOCTOR_REQUEST"  # the variable with the check, its time limit and its settings, as JSON
_REPORT = "findings: "  # begins the line with the findings; a check's process may print other lines
_LONGEST_ERROR = 200  # characters


@dataclass(frozen=True)
class Settings:
    """The settings of a check.

    Attributes:
        ranks_here: number of ranks on the node.
        all_ranks: number of ranks on all nodes.
        workers: number of loader processes of a rank.
        directory: the run directory.
        locked: a file beside the run directory that the head has locked.
        tracking: MLflow's URI; None if the run has none.
        run_file: the run file and its overrides.
    """

    ranks_here: int = 1
    all_ranks: int = 1
    workers: int = 2
    directory: str | None = None
    locked: str | None = None
    tracking: str | None = None
    run_file: Sequence[str] = ()


@dataclass(frozen=True)
class Finding:
    """A line of the report. An `error` would stop a run; a `warning` makes a run slower or less safe.

    Attributes:
        expected: what the check expected; "" if all is well.
        remedy: what to do; "" if all is well.
        node: the name of the machine; "" for a finding about all machines.
    """

    check: str
    level: Level
    found: str
    expected: str = ""
    remedy: str = ""
    node: str = ""


@dataclass(frozen=True)
class Check:
    """A check: its name in findings, its `function` as MODULE:NAME in this folder, its time limit, and what to do if it
    fails."""

    title: str
    function: str
    seconds: float = 60.0
    remedy: str = "find out what the check waits for: a file system, a driver"

    def request(self, settings: Settings) -> dict[str, str]:
        """The environment in which this program runs the check."""
        return {_REQUEST: json.dumps([self.function, self.seconds, asdict(settings)])}

    def findings(self, rank: str, code: int, last_lines: Sequence[str] = ()) -> list[Finding]:
        """The findings of a process that has ended with the exit code `code` after `last_lines`. `rank`: how the
        failure of a rank's process begins; "": it is no rank."""
        reports = [line.removeprefix(_REPORT) for line in last_lines if line.startswith(_REPORT)]
        if reports:
            return [Finding(**finding) for finding in json.loads(reports[-1])]
        error = last_lines[-1] if last_lines else f"exit code {code}"
        late = code == -signal.SIGALRM
        said = f"no answer within {self.seconds:g} s" if late else f"the check failed: {error[:_LONGEST_ERROR]}"
        return [Finding(self.title, "error", f"{rank}{said}", "", self.remedy)]


NODE_CHECKS = [
    Check("versions", "machine:versions"),
    Check("GPUs", "machine:gpus"),
    Check("memory", "machine:memory"),
    Check("run directory", "machine:run_directory", 90),
    Check("tracking", "machine:tracking"),
]
RUN_FILE = Check("run file", "machine:run_file", 300)  # once for all nodes
# Checks of all ranks together. Importing torch from a network file system is slow; DeepSpeed may compile.
_REACHABLE = "the first node must be reachable from every rank (firewall, NCCL_SOCKET_IFNAME)"
ALL_REDUCE = Check("all-reduce", "ranks:all_reduce", 180, _REACHABLE)


def main() -> None:
    function, seconds, settings = json.loads(os.environ[_REQUEST])
    signal.setitimer(signal.ITIMER_REAL, seconds)
    check = pkgutil.resolve_name(f"launch.tools.doctor.{function}")
    findings = [asdict(finding) for finding in check(Settings(**settings))]
    print(f"{_REPORT}{json.dumps(findings)}", flush=True)


if __name__ == "__main__":
    main()
