"""Wraps each rank under DeepSpeed's launcher: writes the rank's output to its log and reports its exit code.

It is a script that imports only the standard library, so that it starts in a hundredth of a second. Blocked signals
stay blocked here and in the rank; a shell would unblock them.
"""

import contextlib
import os
import sys

STARTED, ENDED = "rank wrapper started:", "rank ended:"
_SIGNAL = 128  # shells add it to the number of the signal that ended a process


def main(logs: str, reports: str, rank: int, command: list[str]) -> int:
    """Runs `command` with its output and exit code in files below `logs`; reports to the launcher's stdout.

    `command` finds the file descriptor of that stdout in the environment, under the name `reports`.
    """
    launcher = os.dup(1)
    directory: int | None = None
    with contextlib.suppress(OSError):  # then the output goes to the launcher's stdout
        directory = os.open(logs, os.O_RDONLY | os.O_DIRECTORY)  # its name changes when a standby becomes an attempt
        opened = os.open(f"rank-{rank:05d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644, dir_fd=directory)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
    _say(launcher, f"{STARTED} {os.getppid()} {os.getpid()} {rank}")
    os.set_inheritable(launcher, True)
    process = os.posix_spawnp(command[0], command, {**os.environ, reports: str(launcher)})
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    exit_code = code if code >= 0 else _SIGNAL - code
    with contextlib.suppress(OSError):
        written = os.open(f"rank-{rank:05d}.exit", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=directory)
        os.write(written, f"{exit_code}\n".encode())  # for people; a full disk may lose it
    _say(launcher, f"{ENDED} {os.getpid()} {rank} {code}")
    return exit_code


def _say(launcher: int, report: str) -> None:
    with contextlib.suppress(OSError):
        os.write(launcher, f"{report}\n".encode())


if __name__ == "__main__":
    logs, reports, *command = sys.argv[1:]
    sys.exit(main(os.environ[logs], reports, int(os.environ["RANK"]), command))
