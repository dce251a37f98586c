"""The way of a training step through the code."""

from checks.walk import files, walk
from tests.pretrain.runs import run_file

MOST = 48


def test_a_steady_step_runs_few_files(small_corpus, tmp_path):
    """A step that logs, saves and evaluates nothing."""
    path = run_file(tmp_path, small_corpus, stage=1, checkpoint={"every_steps": 100}, tracking={"mlflow": None})
    found = walk(str(path), [], step=6)
    assert "pretrain/train/trainer.py" in files(found)
    assert len(files(found)) <= MOST, "\n".join(files(found))
