"""Runs whose ranks die, hang or compute wrong at a step, and that go on by themselves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.corpus import open_corpus
from pretrain.faults import restarts
from pretrain.run import node_memory, status
from tests.launch.conftest import a_run
from tests.launch.steps import Planned, environment
from tests.pretrain.runs import losses, steps_taken


def launched(path: Path, *overrides: str, planned: tuple[Planned, ...] = ()) -> subprocess.CompletedProcess[str]:
    """What `launch local` with two ranks comes to, which do what is planned."""
    command = [str(Path(sys.executable).with_name("launch")), "local", str(path), "--ranks", "2", *overrides]
    return subprocess.run(command, env={**os.environ, **environment(*planned)}, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_goes_on_by_itself_with_the_same_losses_and_loses_a_step_or_two(small_corpus, undisturbed, tmp_path):
    """Rank 1 is killed and later stopped, then rank 0 is killed; checkpoints on disk are 50 steps apart."""
    path, run, stopped = a_run(tmp_path, small_corpus), tmp_path / "run", str(tmp_path / "stopped")
    planned = (
        Planned(1, 30, "kill"),
        Planned(1, 60, "stop", stopped, attempt=2),
        Planned(0, 60, "hang", stopped, attempt=2),
        Planned(0, 90, "kill", attempt=3),
    )
    done = launched(path, "checkpoint.every_steps=50", "checkpoint.memory_every_steps=1", planned=planned)
    assert done.returncode == 0, done.stderr
    assert losses(path) == undisturbed
    first, second, third, last = restarts.read(run)
    assert (first.rank, first.killed, first.cause) == (1, True, "rank 1 was killed by SIGKILL")
    hung = "rank 1 makes no progress, and its process is stopped (SIGSTOP); 1 rank waited for it"
    assert (second.rank, second.cause) == (1, hung)
    assert (third.rank, third.outcome, last.outcome) == (0, "failed", "finished")
    taken = steps_taken(run)
    assert len(taken) - len(set(taken)) <= 6
    assert (memory := node_memory.path(run)) is not None
    assert not memory.exists()
    assert "starting attempt 4 (faults.restarts)\n" in done.stderr
    assert done.stderr.count("training again, ") == 3


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
    done = launched(a_run(tmp_path, corpus))
    assert done.returncode == 1
    first, second = restarts.read(tmp_path / "run")
    assert "sha256 differs" in first.error
    assert first.same_failure(second)
    assert f"has failed twice with the same error ({second.error}) and no new checkpoint between" in done.stderr
    failed = status.read(tmp_path / "run")
    assert (failed.state, failed.attempt) == ("failed", 2)
    assert done.stderr.rstrip().endswith(failed.reason)
    assert done.stderr.count("starting attempt") == 1


@pytest.mark.slow
def test_a_rank_whose_arithmetic_is_wrong_twice_ends_the_run_and_is_recorded(small_corpus, tmp_path):
    """From step 4 on, what rank 1 computes in the steps themselves is a little too much."""
    wrong = (Planned(1, 4, "wrong", attempt=None),)
    done = launched(
        a_run(tmp_path, small_corpus), "faults.replay_every_steps=2", "checkpoint.every_steps=2", planned=wrong
    )
    assert done.returncode == 1
    first, second = restarts.read(tmp_path / "run")
    for one, clean in ((first, 2), (second, 3)):  # the first step of each attempt is replayed too
        assert (one.rank, one.step, one.faulty_node) == (1, 4, node_memory.node_name())
        assert "step 4: rank 1 (" in one.error
        assert one.error.endswith(f"; nothing was wrong at step {clean}")
    assert (first.checkpoint, second.checkpoint) == (2, 2)
    assert f"no further attempt: the arithmetic of {first.faulty_node} was found wrong twice" in done.stderr
