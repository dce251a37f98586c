"""Runs whose ranks are killed, and that go on by themselves from what is in memory."""

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.corpus import open_corpus
from pretrain.faults import restarts
from pretrain.run import node_memory
from tests.launch.conftest import a_run
from tests.pretrain.runs import losses, steps_taken

PROGRAM = str(Path(sys.executable).with_name("launch"))


@contextlib.contextmanager
def launched(path: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """`launch local` with two ranks; nothing of it outlives the block."""
    errors = path.with_name("stderr").open("w")
    command = [PROGRAM, "local", str(path), "--ranks", "2", *overrides]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        errors.close()


def signal_rank(process: subprocess.Popen[str], run: Path, rank: int, step: int, number: int) -> None:
    """Sends a signal to a rank as soon as it has begun `step`, as its heartbeat shows."""
    node = node_memory.path(run)
    assert node is not None
    while process.poll() is None:
        for path in node.glob(f"ranks-*/rank-{rank}"):
            with contextlib.suppress(OSError, struct.error):
                pid, begun = struct.unpack("<qq", path.read_bytes()[:16])
                if begun >= step:
                    os.kill(pid, number)
                    return
        time.sleep(0.01)
    raise AssertionError(f"ended with {process.returncode}")


@pytest.mark.slow
def test_a_run_goes_on_by_itself_with_the_same_losses_and_loses_a_step_or_two(small_corpus, undisturbed, tmp_path):
    """Rank 1 is killed, then rank 0; checkpoints on disk are 50 steps apart."""
    path, run = a_run(tmp_path, small_corpus), tmp_path / "run"
    with launched(path, "checkpoint.every_steps=50", "checkpoint.memory_every_steps=1") as process:
        signal_rank(process, run, 1, 30, signal.SIGKILL)
        while len(restarts.read(run)) < 1:
            time.sleep(0.05)
        signal_rank(process, run, 0, 90, signal.SIGKILL)
        assert process.wait() == 0, path.with_name("stderr").read_text()
    assert losses(path) == undisturbed
    first, second, third = restarts.read(run)
    assert (first.rank, first.killed, first.cause) == (1, True, "rank 1 was killed by SIGKILL")
    assert (second.rank, second.outcome, third.outcome) == (0, "failed", "finished")
    taken = steps_taken(run)
    assert len(taken) - len(set(taken)) <= 4
    assert node_memory.path(run) is not None
    assert not node_memory.path(run).exists()  # type: ignore[union-attr]
    said = path.with_name("stderr").read_text()
    assert "starting attempt 3 (faults.restarts)\n" in said
    assert "training again, " in said


@pytest.mark.slow
def test_the_rank_that_is_stopped_is_blamed_and_not_the_one_that_waits_for_it(small_corpus, undisturbed, tmp_path):
    path, run = a_run(tmp_path, small_corpus), tmp_path / "run"
    with launched(path, "faults.hang_seconds=8", "checkpoint.memory_every_steps=1") as process:
        signal_rank(process, run, 1, 30, signal.SIGSTOP)
        assert process.wait() == 0, path.with_name("stderr").read_text()
    assert losses(path) == undisturbed
    first, _ = restarts.read(run)
    assert first.rank == 1
    assert first.cause == "rank 1 makes no progress, and its process is stopped (SIGSTOP); 1 rank waited for it"


def test_a_run_that_fails_at_the_same_place_again_is_not_started_for_ever(small_corpus, tmp_path):
    """Every other block of its corpus is damaged, which no restart mends."""
    corpus = tmp_path / "corpus"
    shutil.copytree(small_corpus, corpus)
    blocks = open_corpus(corpus).blocks("train")
    for shard in (corpus / "shards/train").iterdir():
        content = bytearray(shard.read_bytes())
        for place in blocks.of_shard(f"shards/train/{shard.name}")[::2].tolist():
            content[int(blocks.offset[place]) + 700] ^= 1
        shard.write_bytes(content)
    path, run = a_run(tmp_path, corpus), tmp_path / "run"
    with launched(path) as process:
        assert process.wait() == 1
    first, second = restarts.read(run)
    assert "sha256 differs" in first.error
    assert first.same_failure(second)
    said = path.with_name("stderr").read_text()
    assert "has failed twice with the same error and no new checkpoint between" in said
    assert said.count("starting attempt") == 1


WRONG = """
import builtins, os, sys
usual = builtins.__import__

def imported(*arguments, **options):
    module = usual(*arguments, **options)
    engine = getattr(sys.modules.get("pretrain.zero.engine"), "Engine", None)
    if engine and os.environ.get("RANK") == "1" and engine._loss.__name__ == "_loss":
        right, step = engine._loss, engine.step

        def wrong(self, losses, counted):
            return right(self, losses, counted) * (1 + 2**-10 * getattr(self, "is_wrong", False))

        def taken(self, number, *rest):
            self.is_wrong = number + 1 >= 4
            found = step(self, number, *rest)
            self.is_wrong = False
            return found

        engine._loss, engine.step = wrong, taken
    return module

builtins.__import__ = imported
"""


@pytest.mark.slow
def test_a_rank_whose_arithmetic_is_wrong_twice_ends_the_run_and_is_recorded(small_corpus, tmp_path, monkeypatch):
    """From step 4 on, what rank 1 computes in the steps themselves is a little too much."""
    (tmp_path / "sitecustomize.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    path, run = a_run(tmp_path, small_corpus), tmp_path / "run"
    with launched(path, "faults.replay_every_steps=2", "checkpoint.every_steps=2") as process:
        assert process.wait() == 1
    first, second = restarts.read(run)
    for one, clean in ((first, 2), (second, 3)):  # the first step of each attempt is replayed too
        assert (one.rank, one.step, one.faulty_node) == (1, 4, node_memory.node_name())
        assert "step 4: rank 1 (" in one.error
        assert one.error.endswith(f"; nothing was wrong at step {clean}")
    assert (first.checkpoint, second.checkpoint) == (2, 2)
    said = path.with_name("stderr").read_text()
    assert f"no further attempt: the arithmetic of {first.faulty_node} was found wrong twice" in said
