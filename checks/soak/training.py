"""Kills training at random moments and compares what it comes to with an undisturbed run.

    python -m checks.soak.training same   [--kills 40] [--seed 0] [--minutes 30]
    python -m checks.soak.training change [--kills 40] [--seed 0] [--minutes 30]

A small T5 is trained by `launch local` on real text, with dropout and accumulation. SIGKILL hits a rank or
the supervisor: while they start, between steps, in the middle of a save. A run that ends is started again until it is
finished.

same: always on 2 ranks at ZeRO stage 2. Losses and parameters must be those of the undisturbed run, bit for bit.
change: each start on 1, 2 or 4 ranks and at stage 1, 2 or 3; twice the disk fills up, twice a file of the latest
checkpoint is damaged. The rows of every step must be the schedule's, none lost or doubled; losses agree to rounding.
The run directory is on a small file system of its own, which takes root, or else user namespaces.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from data_pipeline.base.config_file import load
from data_pipeline.corpus import open_corpus
from data_pipeline.loading.stream import Stream
from pretrain.config import RunConfig
from pretrain.engine.checkpoint.directory import all_steps
from pretrain.engine.checkpoint.index import newest
from pretrain.engine.checkpoint.tensors import PARAMETER, StoredTensors
from tests.conftest import TOP, run, write_c4, write_corpus_file
from tests.support.recorded import largest_relative_difference, recorded_rows, scheduled_rows
from tests.support.runs import losses, run_file, train_ranks

VICTIMS = ("rank", "supervisor")
MOMENTS = ("start", "step", "save")
ROWS, LANES = 16, 8
_SECONDS_TO_START, _SECONDS_TO_GO = 120.0, 30.0
_DISK_BYTES = 64 << 20


@dataclass
class Outcome:
    """The results of a soak. `kills`: by (victim, moment). `problems`: what should not have happened."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    full_disks: int = 0
    damages: int = 0
    steps: int = 0
    largest_difference: float = 0.0
    problems: list[str] = field(default_factory=list)


class Run:
    """A run file in `folder`, and the files of its run. Its log and its records are beside `folder`."""

    def __init__(self, folder: Path, corpus: Path, steps: int, beside: Path):
        self.log, self.records = beside / f"{folder.name}.log", beside / f"{folder.name}-rows"
        self.records.mkdir()
        self.path = run_file(
            folder,
            corpus,
            run={"max_steps": steps},
            data={"train": [{"corpus": str(corpus)}], "lanes": LANES, "workers": 0},
            batch={"global_batch_size": ROWS, "micro_batch_size": 2},
            evaluation=[],
            faults={"max_restarts": 0, "dead_rank_seconds": 2, "hang_timeout_seconds": 60},
            checkpoint={"every_steps": 4, "keep_last": 3},
        )
        self.directory = folder / "run"

    def start(self, ranks: int, stage: int) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "launch", "local", str(self.path), "--ranks", str(ranks)]
        program += [f"deepspeed.zero_optimization.stage={stage}"]
        paths = [str(Path(__file__).parent / "recorder"), str(TOP), os.environ.get("PYTHONPATH", "")]
        own = {"RECORDED_ROWS": str(self.records), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with self.log.open("ab") as file:
            return subprocess.Popen(
                program, stdout=file, stderr=file, env={**os.environ, **own}, start_new_session=True
            )

    def step(self) -> int:
        """The number of lines in the log of metrics: a clock that ticks with the steps."""
        with contextlib.suppress(FileNotFoundError), (self.directory / "metrics.jsonl").open("rb") as file:
            return sum(1 for _ in file)
        return 0

    def parameters(self) -> dict[str, torch.Tensor]:
        latest = newest(self.directory)
        assert latest is not None
        stored = StoredTensors(latest)
        return {name: stored.whole(PARAMETER, name) for name in stored.shapes}

    def tail(self) -> str:
        return self.log.read_text()[-3000:]


def soak(folder: Path, corpus: Path, change: bool, kills: int, seed: int, seconds: float, steps: int) -> Outcome:
    """Trains for `steps` steps with up to `kills` kills, none after `seconds`; then lets the run finish."""
    outcome, generator = Outcome(steps=steps), random.Random(seed)
    whole = Run(folder / "whole", corpus, steps, folder)
    assert train_ranks(whole.path, 2) == [0, 0]
    with _small_disk(folder) if change else contextlib.nullcontext(folder) as disk:
        killed = Run(disk / "killed", corpus, steps, folder)
        _train(killed, change, kills, generator, time.monotonic() + seconds, outcome)
        if not outcome.problems:
            _compare(killed, whole, corpus, change, outcome)
    return outcome


def _corpus(folder: Path) -> Path:
    write_c4(folder / "c4.json.gz", records=120)
    done = run("data-pipeline", "build", write_corpus_file(folder / "corpus.yaml"))
    if done.returncode:
        raise SystemExit(done.stderr)
    return folder / "corpus"


def _train(killed: Run, change: bool, kills: int, generator: random.Random, until: float, outcome: Outcome) -> None:
    """Starts the run until it is finished, and kills it as long as kills are allowed."""
    while True:
        ranks, stage = (generator.choice((1, 2, 4)), generator.choice((1, 2, 3))) if change else (2, 2)
        count = outcome.kills.total()
        if change and outcome.damages < 2 and count >= (outcome.damages + 1) * kills // 3:
            outcome.damages += _damage(killed.directory, generator)
        outcome.starts[f"{ranks} ranks, stage {stage}"] += 1
        supervisor = killed.start(ranks, stage)
        try:
            if count < kills and time.monotonic() < until:
                if change and outcome.full_disks < 2 and count >= (2 * outcome.full_disks + 1) * kills // 4:
                    outcome.full_disks += _fill_disk(killed, supervisor)
                victim, moment = generator.choice(VICTIMS), generator.choice(MOMENTS)
                if _wait_for(moment, killed, supervisor, generator) and _kill(victim, supervisor, generator):
                    outcome.kills[victim, moment] += 1
                    print(f"{outcome.kills.total()}: {victim}, {moment}, {len(losses(killed.path))} steps", flush=True)
                    supervisor.wait(_SECONDS_TO_START)
                    _wait_until_gone(killed, outcome)
                    continue
            code = supervisor.wait(_SECONDS_TO_START + 5 * outcome.steps)
        except subprocess.TimeoutExpired:
            outcome.problems.append(f"the run hangs:\n{killed.tail()}")
            return
        finally:
            _end(supervisor)
        if code == 0:
            return
        outcome.problems.append(f"the run failed with {code} without having been hit:\n{killed.tail()}")
        return


def _wait_for(moment: str, killed: Run, supervisor: subprocess.Popen[bytes], generator: random.Random) -> bool:
    """Waits for a moment of this kind; returns False if the run ended before."""
    before = killed.step()
    deadline = time.monotonic() + _SECONDS_TO_START
    if moment == "start":
        deadline = time.monotonic() + generator.uniform(1, 15)
        wanted = float("inf")
    else:
        wanted = before + generator.randint(1, 12)
    while time.monotonic() < deadline and killed.step() < wanted:
        if supervisor.poll() is not None:
            return False
        time.sleep(0.01)
    while moment == "save" and not list((killed.directory / "checkpoints").glob(".step-*.tmp")):
        if supervisor.poll() is not None:
            return False
    return True


def _kill(victim: str, supervisor: subprocess.Popen[bytes], generator: random.Random) -> bool:
    """Sends SIGKILL to a victim of this kind, or to the supervisor if there is none yet."""
    try:
        tree = psutil.Process(supervisor.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return False
    found = [process for process in tree if victim == "rank" and "-m\0pretrain\0train" in _command(process)]
    found = [process for process in found if not _is_fork(process)]  # not the loader of a rank
    with contextlib.suppress(psutil.NoSuchProcess):
        (generator.choice(found) if found else psutil.Process(supervisor.pid)).send_signal(signal.SIGKILL)
    return True


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return "\0".join(process.cmdline())
    return ""


def _is_fork(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and _command(parent) == _command(process)
    return False


def _wait_until_gone(killed: Run, outcome: Outcome) -> None:
    """Checks that no process of the run outlives its supervisor for long."""
    deadline = time.monotonic() + _SECONDS_TO_GO
    while left := [process for process in psutil.process_iter() if str(killed.path) in _command(process)]:
        if time.monotonic() > deadline:
            outcome.problems.append(f"left behind: {[_command(process) for process in left]}")
            return
        time.sleep(0.1)


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    if supervisor.poll() is None:
        supervisor.kill()
        supervisor.wait()


def _damage(directory: Path, generator: random.Random) -> bool:
    """Flips a bit in a tensor file of the latest checkpoint, if another checkpoint could take its place."""
    latest = newest(directory)
    if latest is None or len(all_steps(directory)) < 2:
        return False
    path = generator.choice(sorted(latest.glob("*.safetensors")))
    content = bytearray(path.read_bytes())
    content[-1 - generator.randrange(len(content) // 2)] ^= 1 << generator.randrange(8)
    path.write_bytes(content)
    print(f"damaged {path}", flush=True)
    return True


def _fill_disk(killed: Run, supervisor: subprocess.Popen[bytes]) -> bool:
    """Fills the disk until a save has failed."""
    before, told = killed.step(), killed.log.read_text().count("can't be saved")
    while killed.step() <= before:
        if supervisor.poll() is not None:
            return False
        time.sleep(0.01)
    filler = killed.path.with_name("filler")
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        deadline = time.monotonic() + _SECONDS_TO_START
        while killed.log.read_text().count("can't be saved") == told:
            if supervisor.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    finally:
        filler.unlink()
    print("the disk was full", flush=True)
    return True


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _compare(killed: Run, whole: Run, corpus: Path, change: bool, outcome: Outcome) -> None:
    found, wanted = losses(killed.path), losses(whole.path)
    outcome.largest_difference = largest_relative_difference(found, wanted)
    if not change:
        outcome.problems += [
            f"step {step}: loss {found.get(step)}, undisturbed {wanted[step]}"
            for step in wanted
            if found.get(step) != wanted[step]
        ]
        theirs, ours = whole.parameters(), killed.parameters()
        outcome.problems += [f"{name} differs" for name in theirs if not torch.equal(theirs[name], ours[name])]
    elif outcome.largest_difference > 1e-4:
        outcome.problems.append(f"losses differ by up to {outcome.largest_difference:.1e} of their value")
    data = load(killed.path, [], RunConfig).data
    stream = Stream([open_corpus(corpus)], [data.train[0].weight], 0, LANES)
    scheduled = scheduled_rows(stream, ROWS, outcome.steps)
    recorded = recorded_rows(killed.records)
    outcome.problems += [
        f"step {step + 1}: other rows than the schedule's"
        for step in scheduled
        if recorded.get(step) != scheduled[step]
    ]
    outcome.problems += [f"{path} is left" for path in (killed.directory / "checkpoints").glob(".*")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m checks.soak.training", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("same", "change"))
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30)
    arguments = parser.parse_args()
    change = arguments.kind == "change"
    if change and os.geteuid():  # with mounts of its own, and as root among them
        unshare = ["unshare", "--user", "--map-root-user", "--mount"]
        os.execvp("unshare", [*unshare, sys.executable, "-m", "checks.soak.training", *sys.argv[1:]])
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    kills, seconds = arguments.kills, arguments.minutes * 60
    outcome = soak(folder, _corpus(folder), change, kills, arguments.seed, seconds, steps=10 * kills)
    kinds = {kind: sum(n for key, n in outcome.kills.items() if kind in key) for kind in (*VICTIMS, *MOMENTS)}
    print(f"{outcome.kills.total()} kills: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}")
    print(f"starts: {', '.join(f'{n} × {kind}' for kind, n in sorted(outcome.starts.items()))}")
    if change:
        print(f"the disk was full {outcome.full_disks} times, a file was damaged {outcome.damages} times")
    print(f"{outcome.steps} steps in {time.monotonic() - started:.0f} s")
    if outcome.problems:
        print("\n".join(outcome.problems[:20]), f"\nall that was written is in {folder}")
        return 1
    shutil.rmtree(folder)
    same = "losses, rows and parameters are those of the undisturbed run, bit for bit"
    near = f"rows are the schedule's; losses differ by at most {outcome.largest_difference:.1e} of their value"
    print(near if change else same)
    return 0


if __name__ == "__main__":
    sys.exit(main())
