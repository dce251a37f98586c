"""Commands that see a file system of their own."""

import os
import subprocess
from pathlib import Path

import pytest


def mounted(where: Path, options: str, command: list[str], errors: Path) -> subprocess.CompletedProcess[str]:
    """Runs `command` where a tmpfs is mounted at `where`, which nobody else sees. Its stderr goes to `errors`."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("a file system of one's own takes root or user namespaces")
    where.mkdir(exist_ok=True)
    script = 'mount -t tmpfs -o "$0" tmpfs "$1" && shift && exec "$@"'
    with errors.open("w") as stderr:
        inside = [*unshare, "sh", "-c", script, options, where, *command]
        done = subprocess.run(inside, stdout=subprocess.PIPE, stderr=stderr, text=True)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout, errors.read_text())
