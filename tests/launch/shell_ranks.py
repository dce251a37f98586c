"""The supervisor with a launcher and ranks of a few lines of shell.

`python -m tests.launch.shell_ranks RUN SCRIPT…` supervises a rank for each script, without the seconds that PyTorch's
import takes.
"""

import json
import os
import sys
from pathlib import Path

from launch.head import supervise
from launch.rank_processes import wrapped
from pretrain.run import heartbeat

DONE = f"touch ${heartbeat.DIRECTORY}/rank-$RANK.done"
LAUNCHER = """
import json, os, subprocess, sys
words, *ranks = json.loads(sys.argv[1])
started = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank, command in enumerate(ranks)]
print(words, flush=True)
sys.exit(max([process.wait() for process in started]))
"""


def supervised(run: Path, *ranks: str, words: str = "", dead_rank_seconds: float = 3600) -> int:
    """The exit code of a supervised launcher that starts a shell script for each rank, prints `words` and waits."""
    commands = [wrapped(["sh", "-c", script]) for script in ranks]
    launcher = [sys.executable, "-S", "-c", LAUNCHER, json.dumps([words, *commands])]
    return supervise(launcher, dict(os.environ), run, len(ranks), dead_rank_seconds)


if __name__ == "__main__":
    sys.exit(supervised(Path(sys.argv[1]), *sys.argv[2:]))
