"""Kills builds at random moments and compares the results with an undisturbed build.

    python -m checks.soak.build [--kills 30] [--seed 0] [--minutes 15]

The shipped sample of C4 is first built undisturbed, with every stage that there is, by one worker. Then it is built
again and again in a fresh directory by two workers, which merge files too, while SIGKILL hits the driver, a worker at
work, the raylet or all processes at once. A build that ends is started again, until it completes. Every file of each
finished corpus, except the report, which contains times, must have the same sha256.
"""

import argparse
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from checks.faults.builds import write_inputs
from tests.support.builds import MERGING, at_work, checksums, differences, family, raylets

VICTIMS = ("driver", "worker", "raylet", "all")
_SECONDS_TO_FINISH = 180.0


@dataclass
class Outcome:
    """The results of a soak. `problems`: differences, hangs, and builds that failed without having been hit."""

    kills: Counter[str] = field(default_factory=Counter)
    builds: int = 0
    files: int = 0
    problems: list[str] = field(default_factory=list)


def soak(config: Path, kills: int, seed: int, seconds: float, pause: float) -> Outcome:
    """Builds beside `config` until `kills` kills or `seconds` are reached. `pause`: the longest time between kills."""
    folder, outcome, generator = config.parent, Outcome(), random.Random(seed)
    wanted = folder / "undisturbed"
    done = _start(config, wanted, folder / "undisturbed.log", "-m", "data_pipeline", workers=1).wait(_SECONDS_TO_FINISH)
    if done != 0:
        outcome.problems.append(f"the undisturbed build failed:\n{(folder / 'undisturbed.log').read_text()}")
        return outcome
    expected = checksums(wanted)
    outcome.files = len(expected)
    until = time.monotonic() + seconds
    while outcome.kills.total() < kills and time.monotonic() < until and not outcome.problems:
        corpus = folder / "killed"
        shutil.rmtree(corpus, ignore_errors=True)
        _build(config, corpus, folder / f"build-{outcome.builds}.log", kills, pause, generator, outcome)
        outcome.builds += 1
        if outcome.problems:
            break
        outcome.problems += [f"build {outcome.builds}: {problem}" for problem in differences(corpus, expected)]
    return outcome


def _build(
    config: Path, corpus: Path, log: Path, kills: int, pause: float, generator: random.Random, outcome: Outcome
) -> None:
    """Runs one build, starting it again until it completes."""
    seen: set[psutil.Process] = set()
    driver, hit = _start(config, corpus, log), False
    quiet_since = time.monotonic()
    try:
        while True:
            may_kill = outcome.kills.total() < kills
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(generator.uniform(0.5, pause) if may_kill else 1.0)
            if driver.returncode == 0:
                return
            if driver.returncode is not None:
                if not hit:
                    outcome.problems.append(f"a build failed without having been hit:\n{log.read_text()[-3000:]}")
                    return
                driver, hit = _start(config, corpus, log), False
                quiet_since = time.monotonic()
            elif may_kill:
                victim = _kill(generator, driver.pid, corpus, seen)
                outcome.kills[victim] += victim != ""
                hit = hit or victim != ""
                quiet_since = time.monotonic()
                print(f"{outcome.kills.total()}: {victim or 'nobody'}", flush=True)
            elif time.monotonic() - quiet_since > _SECONDS_TO_FINISH:
                outcome.problems.append(f"a build hangs:\n{log.read_text()[-3000:]}")
                return
    finally:
        if driver.poll() is None:
            seen.update(family(driver.pid))
        for process in seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        driver.wait()


def _start(config: Path, corpus: Path, log: Path, *program: str, workers: int = 2) -> subprocess.Popen[bytes]:
    settings = [f"output={corpus}", f"ray.num_cpus={workers}", "ray.small_bytes=0"]
    command = [sys.executable, *(program or ("-c", MERGING)), "build", str(config), *settings]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def _kill(generator: random.Random, driver: int, corpus: Path, seen: set[psutil.Process]) -> str:
    """Kills a random process of the build of `corpus` by `driver`; returns its kind, or "" if there is none."""
    victim = generator.choice(VICTIMS)
    tree = family(driver)
    seen.update(tree)
    if victim == "all":
        targets = tree
    elif victim == "driver":
        targets = tree[:1]
    else:
        candidates = raylets(tree) if victim == "raylet" else at_work(tree, corpus)
        targets = [generator.choice(candidates)] if candidates else []
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    return victim if targets else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m checks.soak.build", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=15)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shards = {"rows_per_block": 256, "blocks_per_shard": 16}  # several shards
        config = write_inputs(Path(folder), records=330, shards=shards)
        outcome = soak(config, arguments.kills, arguments.seed, arguments.minutes * 60, pause=20)
    by_victim = ", ".join(f"{outcome.kills[victim]} {victim}" for victim in VICTIMS)
    print(f"{outcome.kills.total()} kills ({by_victim}) in {outcome.builds} builds, {time.monotonic() - started:.0f} s")
    print("\n".join(outcome.problems) or f"every build's {outcome.files} files are those of the undisturbed build")
    return int(bool(outcome.problems))


if __name__ == "__main__":
    sys.exit(main())
