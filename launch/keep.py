"""Run for each rank by DeepSpeed's launcher: keeps what the rank writes, and reports how it ends.

A script of its own without imports from outside Python, so that it starts in a hundredth of a second. Signals that are
held back stay so, here and in the rank: a shell would let them through.
"""

import contextlib
import os
import sys

STARTED, ENDED = "keeper started:", "rank ended:"
_SIGNAL = 128  # what a shell would add to the number of the signal that ended a process


def main(logs: str, rank: int, command: list[str]) -> int:
    """Runs `command` with its output and exit code in files below `logs`; reports to the launcher's stdout."""
    launcher = os.dup(1)
    log = f"{logs}/rank-{rank:05d}"
    with contextlib.suppress(OSError):  # the launcher's stdout, then, is better than nothing
        kept = os.open(f"{log}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(kept, 1)
        os.dup2(kept, 2)
    _say(launcher, f"{STARTED} {os.getppid()} {os.getpid()}")
    process = os.posix_spawnp(command[0], command, os.environ)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    told = code if code >= 0 else _SIGNAL - code
    with contextlib.suppress(OSError), open(f"{log}.exit", "w") as file:  # noqa: PTH123
        print(told, file=file)  # for people: the supervisor can't rely on it, since a disk may be full
    _say(launcher, f"{ENDED} {os.getpid()} {rank} {code}")
    return told


def _say(launcher: int, report: str) -> None:
    with contextlib.suppress(OSError):
        os.write(launcher, f"{report}\n".encode())


if __name__ == "__main__":
    sys.exit(main(os.environ[sys.argv[1]], int(os.environ["RANK"]), sys.argv[2:]))
