"""The share of useful time (ETTR) of a run that meets a failure every so many seconds, with nobody at the keyboard.

    python -m checks.soak.ettr RUN.yaml --every 30 --minutes 60 [KEY=VALUE …]

`launch local` trains on two ranks. A rank gets SIGKILL at moments that a seed draws, as far apart as asked for on
average. Useful is the time of steps by the run's own clock, each step once; the time that it is a share of is that of
the whole command. Prints the distribution of the time from a failure to the next step too.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

from pretrain.run import restarts
from pretrain.run.metrics_file import read_metrics

RANKS = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.soak.ettr", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--every", type=float, required=True, help="seconds")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ettr-")) / "run"
    changes = [f"run.directory={directory}", "run.max_steps=1000000", "tracking.log_every_steps=1"]
    changes += ["faults.max_restarts=100000", "evaluation=[]", *given.overrides]
    program = str(Path(sys.executable).with_name("launch"))
    generator, began = random.Random(given.seed), time.time()
    process = subprocess.Popen([program, "local", str(given.run), "--ranks", str(RANKS), *changes])
    until, kills = began + 60 * given.minutes, 0
    pause = generator.expovariate(1 / given.every)
    while process.poll() is None and time.time() + pause < until:
        time.sleep(pause)
        kills += _killed(process.pid, generator.randrange(RANKS))
        pause = generator.expovariate(1 / given.every)
    time.sleep(max(0.0, until - time.time()))
    process.send_signal(signal.SIGTERM)
    code, wall = process.wait(), time.time() - began
    rows = {row.step: row.metrics["train/seconds"] for row in read_metrics(directory) if "train/loss" in row.metrics}
    useful = sum(rows.values())
    records = restarts.read(directory)
    times = sorted(
        after.trained_from - one.ended
        for one, after in pairwise(records)
        if one.outcome == "failed" and after.trained_from is not None
    )
    found = {
        "exit_code": code,
        "kills": kills,
        "failures": sum(one.outcome == "failed" for one in records),
        "steps": len(rows),
        "last_step": max(rows, default=0),
        "wall_seconds": round(wall, 1),
        "ettr": round(useful / wall, 4),
        "recovery_p50": round(statistics.median(times), 2) if times else None,
        "recovery_p95": round(times[int(0.95 * (len(times) - 1))], 2) if times else None,
        "directory": str(directory),
    }
    print(json.dumps(found, indent=1))
    return int(code != 75 or len(rows) != max(rows, default=0))


def _killed(launcher: int, rank: int) -> bool:
    """Kills `rank` of the attempt that runs, if there is one. Ranks are child processes of `launcher`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children():
            if process.environ().get("RANK") == str(rank):
                process.kill()
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())
