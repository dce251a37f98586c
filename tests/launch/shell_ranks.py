"""The supervisor with a launcher and ranks of a few lines of shell.

`python -m tests.launch.shell_ranks RUN SCRIPT…` supervises a rank for each script, without the seconds that PyTorch's
import takes.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from data_pipeline.foundation.processes import caught
from launch.agent import RankProcesses, wrapped
from launch.head import StopRequests, result, watch
from launch.nodes import Access, Agent, AgentPool
from launch.protocol import Start
from pretrain.run import heartbeat, rank_logs

WAITS = "sleep 3600"
ASKED = "until [ -e {run}/stop ]; do sleep 0.05; done"
STOPPED = """echo '{{"state": "stopped", "attempt": 1, "step": 3}}' > {run}/status.json"""
TO_LAUNCHER = "read -r _ _ _ parent _ < /proc/$PPID/stat; kill -TERM $parent"
DONE = f"touch ${heartbeat.DIRECTORY}/rank-$RANK.done"
LAUNCHER = """
import json, os, subprocess, sys
words, *ranks = json.loads(sys.argv[1])
started = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank, command in enumerate(ranks)]
print(words, flush=True)
sys.exit(max([process.wait() for process in started]))
"""


def told(kind: str, text: str) -> str:
    """Has a rank tell something, as pretrain.run.heartbeat does."""
    folder = f"${heartbeat.DIRECTORY}"
    return f"printf '{text}' > {folder}/.$RANK.{kind}; mv {folder}/.$RANK.{kind} {folder}/rank-$RANK.{kind}"


def launcher_of(*ranks: list[str], words: str = "") -> list[str]:
    """A launcher that starts a rank for each command, prints `words` and waits."""
    return [sys.executable, "-S", "-c", LAUNCHER, json.dumps([words, *map(wrapped, ranks)])]


def supervise(
    command: list[str],
    run: Path,
    ranks: int,
    dead_rank_seconds: float = 3600,
    hang_seconds: float | None = None,
    another_follows: bool = False,
) -> int:
    """Runs `command` until its `ranks` have ended; returns the exit code of `result`."""
    requests = StopRequests(run)
    with caught(requests.on_signal):

        def start(logs: Path) -> list[Agent]:
            supervised = {**os.environ, rank_logs.SUPERVISED: str(logs)}
            asked = Start(command, {}, ranks=ranks, hang_seconds=hang_seconds)
            started = RankProcesses(asked, supervised, logs / "launcher.log")
            (agent,) = AgentPool(["here"], Access()).agents  # it is this process, as if it had started the ranks
            agent.connection.started.append(started)
            return [agent]

        attempt = watch(start, ["here"] * ranks, run, requests, dead_rank_seconds, another_follows)
        return result(attempt, run, requests)


def supervised(run: Path, *ranks: str, words: str = "", **options: Any) -> int:
    """The exit code of a supervised launcher that starts a shell script for each rank, prints `words` and waits."""
    commands = [["sh", "-c", script.format(run=run)] for script in ranks]
    return supervise(launcher_of(*commands, words=words), run, len(ranks), **options)


if __name__ == "__main__":
    sys.exit(supervised(Path(sys.argv[1]), *sys.argv[2:]))
