"""Reads hostfiles, and starts agents on hosts with ssh."""

import os
import re
import shlex
import shutil
from pathlib import Path

from data_pipeline.base.errors import UserError
from data_pipeline.base.processes import PYTHON
from launch.nodes import Access, Node

_LINE = re.compile(r"([A-Za-z0-9][\w.@:-]*)\s+slots\s*=\s*([1-9]\d{0,3})")
# After the user's options: ssh takes the first value that an option gets.
_DEFAULTS = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15"]
# Variables of this machine or login. The rest of the environment is passed to the hosts.
_OF_THIS_MACHINE = re.compile(
    r"HOME|HOSTNAME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|TERM|TMPDIR|MAIL|DISPLAY|LS_COLORS|_|CUDA_VISIBLE_DEVICES"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_SIZE|MASTER_ADDR|MASTER_PORT|(SSH|XDG|DBUS|SLURMD?|LC)_.*"
)
_WAITS = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)  # s between tries to reach a lost host


def ssh_options(text: str) -> list[str]:
    """The options in `text`, which is written as in a shell. Raises UserError if a quotation has no end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"--ssh: {text}: {str(error).lower()}") from None


def access(ssh: list[str]) -> Access:
    """The access to hosts through ssh, with further options `ssh`. Raises UserError if ssh isn't installed."""
    if shutil.which("ssh") is None:
        raise UserError("ssh is not on the PATH; `launch` starts agents on the hosts with it")

    def command(host: str) -> list[str]:
        return ["ssh", *ssh, *_DEFAULTS, "--", host, remote_command()]

    return Access(command, portable_environment(), waits=_WAITS)


def read(hostfile: Path) -> list[Node]:
    """The hosts of a file in DeepSpeed's format: `NAME slots=N` in each line, and comments after `#`.

    Raises UserError, which names each line that can't be read.
    """
    try:
        lines = hostfile.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"--hostfile: {hostfile}: can't be read: {reason}") from None
    hosts: dict[str, Node] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        if match and match[1] not in hosts:
            hosts[match[1]] = Node(match[1], int(match[2]))
        elif line:
            found = f"{match[1]} is listed in an earlier line" if match else f"expected `NAME slots=N`, found {line!r}"
            problems.append(f"--hostfile: {hostfile}, line {number}: {found}")
    if problems:
        raise UserError("\n".join(problems))
    if not hosts:
        raise UserError(f"--hostfile: {hostfile}: no hosts; expected a line `NAME slots=N` for each")
    return list(hosts.values())


def remote_command() -> str:
    """The command that starts an agent in a host's login shell. PYTHONPATH is in it; all else goes through stdin."""
    search = [f"PYTHONPATH={path}"] if (path := os.environ.get("PYTHONPATH")) else []
    return f"exec {shlex.join(['env', *search, *PYTHON, '-m', 'launch', 'agent'])}"


def portable_environment() -> dict[str, str]:
    """The variables of this process that are valid on other hosts, too."""
    return {name: value for name, value in os.environ.items() if not _OF_THIS_MACHINE.fullmatch(name)}
