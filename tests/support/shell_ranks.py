"""The supervisor with ranks of a few lines of shell.

`python -m tests.support.shell_ranks RUN SCRIPT…` supervises a rank for each script, without the seconds that PyTorch's
import takes.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.base.processes import caught
from launch.head import StopRequests, result, watch
from launch.nodes import Access, Agent, AgentPool
from launch.protocol import Start
from pretrain.run import heartbeat

WAITS = "sleep 3600"
ASKED = "until [ -e {run}/stop ]; do sleep 0.05; done"
STOPPED = """echo '{{"state": "stopped", "attempt": 1, "step": 3}}' > {run}/status.json"""
# until the kernel would kill the rank with its agent: its stdin, which the agent ties to itself, has O_ASYNC
TIED = "until grep -q '^flags:.*20000$' /proc/self/fdinfo/0; do sleep 0.02; done"
DONE = f"touch ${heartbeat.DIRECTORY}/rank-$RANK.done"


def told(kind: str, text: str) -> str:
    """Has a rank tell something, as pretrain.run.heartbeat does."""
    folder = f"${heartbeat.DIRECTORY}"
    return f"printf '{text}' > {folder}/.$RANK.{kind}; mv {folder}/.$RANK.{kind} {folder}/rank-$RANK.{kind}"


def supervise(
    command: list[str],
    run: Path,
    ranks: int,
    dead_rank_seconds: float = 3600,
    hang_seconds: float | None = None,
    another_follows: bool = False,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs `command` as each of `ranks` ranks until these have ended; returns the exit code of `result`."""
    requests = StopRequests(run)
    with caught(requests.on_signal), AgentPool(["here"], Access()) as pool:

        def start(logs: Path) -> list[Agent]:
            given = {**(environment or {})}
            pool.agents[0].start(Start(command, given, ranks=range(ranks), logs=str(logs), hang_seconds=hang_seconds))
            return pool.agents

        attempt = watch(start, ["here"] * ranks, run, requests, dead_rank_seconds, another_follows)
        return result(attempt, run, requests)


def supervised(run: Path, *ranks: str, **options: Any) -> int:
    """The exit code of supervised ranks, each of which runs a shell script."""
    scripts = {f"SCRIPT_{rank}": script.format(run=run) for rank, script in enumerate(ranks)}
    return supervise(["sh", "-c", 'eval "$(printenv SCRIPT_$RANK)"'], run, len(ranks), environment=scripts, **options)


if __name__ == "__main__":
    sys.exit(supervised(Path(sys.argv[1]), *sys.argv[2:]))
