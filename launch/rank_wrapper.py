"""Wraps each rank under DeepSpeed's launcher: writes the rank's output to its log, and reports its end.

It is a script that imports only the standard library, so that it starts in a hundredth of a second. Blocked signals
stay blocked in the wrapper and in the rank; a shell would unblock them.
"""

import contextlib
import os
import sys
import time

STARTED, ENDED = "started", "ended"
_SIGNAL = 128  # shells add it to the number of the signal that ended a process


def main(logs: str, outcomes: str, rank: int, command: list[str]) -> int:
    """Runs `command` with its output and exit code in files below `logs`.

    Tells the supervisor, in files below `outcomes` (pretrain/run/heartbeat.py), that it has started and how it ended.
    """
    with contextlib.suppress(OSError):  # then the output goes to the launcher's stdout
        opened = os.open(f"{logs}/rank-{rank:05d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
    _tell(outcomes, rank, STARTED, str(os.getpid()))
    process = os.posix_spawnp(command[0], command, os.environ)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    exit_code = code if code >= 0 else _SIGNAL - code
    with contextlib.suppress(OSError):
        written = os.open(f"{logs}/rank-{rank:05d}.exit", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(written, f"{exit_code}\n".encode())  # for people; a full disk may lose it
    _tell(outcomes, rank, ENDED, str(code))
    return exit_code


def _tell(directory: str, rank: int, kind: str, text: str) -> None:
    now, unnamed = time.time_ns(), f"{directory}/.{rank}.{kind}"
    with contextlib.suppress(OSError), open(unnamed, "w") as file:  # noqa: PTH123 (pathlib takes longer to import)
        file.write(text)
        file.close()
        os.utime(unnamed, ns=(now, now))  # the kernel's own times are some milliseconds apart
        os.rename(unnamed, f"{directory}/rank-{rank}.{kind}")  # noqa: PTH104


if __name__ == "__main__":
    logs, outcomes, *command = sys.argv[1:]
    sys.exit(main(os.environ[logs], os.environ[outcomes], int(os.environ["RANK"]), command))
