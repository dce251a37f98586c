"""A run whose ranks die and hang at a step, and that goes on by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.faults import restarts
from pretrain.run import node_memory
from tests.launch.conftest import a_run
from tests.launch.steps import Planned, environment
from tests.pretrain.runs import losses, steps_taken


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
    command = [str(Path(sys.executable).with_name("launch")), "local", str(path), "--ranks", "2"]
    command += ["checkpoint.every_steps=50", "checkpoint.memory_every_steps=1"]
    done = subprocess.run(command, env={**os.environ, **environment(*planned)}, capture_output=True, text=True)
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
