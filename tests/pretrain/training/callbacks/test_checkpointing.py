"""Saves that fail while a run trains, and weights that change while a run is loaded."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError
from pretrain.config import RunConfig
from pretrain.engine.checkpoint.index import is_valid
from pretrain.engine.ranks import joined_world
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file, train
from tests.support.small_runs import flip


def test_what_goes_wrong_around_a_checkpoint_that_is_there_is_a_warning(finished):
    """First `latest` can't be replaced; then an old checkpoint, a link to a directory elsewhere, can't be emptied."""
    checkpoints = finished.parent / "run/checkpoints"
    (checkpoints / "latest").unlink()
    (checkpoints / "latest").mkdir()
    done = train(finished, "run.max_steps=13", "checkpoint.on_failure=stop")
    assert f"warning: {checkpoints}/latest: can't be written: Is a directory" in done.stderr
    assert len(list(checkpoints.glob("step-*"))) == 5
    (checkpoints / "latest").rmdir()
    elsewhere = (checkpoints / "step-00000003").rename(finished.parent / "elsewhere")
    (checkpoints / "step-00000003").symlink_to(elsewhere)
    train(finished, "run.max_steps=14", "checkpoint.on_failure=stop", "checkpoint.keep_last=1")
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000013", "step-00000014"]
    assert (elsewhere / "index.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_disk_that_refuses_a_save_costs_no_other_checkpoint(finished, policy):
    """No file may have more than 200 KiB: the log has room, a checkpoint doesn't."""
    changes = ["run.max_steps=18", f"checkpoint.on_failure={policy}"]
    command = [sys.executable, "-m", "pretrain", "train", str(finished), *changes]
    limited = ["bash", "-c", 'ulimit -f 200; exec "$@"', "bash", *command]
    # else a run keeps the uncommitted changes of this checkout, however long they are
    done = subprocess.run(limited, env=os.environ | {"GIT_DIR": "/dev/null"}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # the last save has failed as well
    assert "File too large; the previous checkpoint is untouched" in done.stderr
    assert ("step 18/18" in done.stdout) == (policy == "continue")
    checkpoints = finished.parent / "run/checkpoints"
    assert (checkpoints / "latest").read_text() == "step-00000012\n"
    assert all(is_valid(one) for one in checkpoints.glob("step-*"))


def loaded_wrong(path: Path) -> None:
    """A run whose weights change a bit as they are loaded ends."""
    from pretrain.engine.deepspeed_private import fragments
    from pretrain.training import run, trainer

    assert run.train_in_group(joined_world(), load(path, [], RunConfig), 4) == 75
    right = trainer.restore

    def wrong(engine: Any, directory: Path) -> None:
        right(engine, directory)
        fragment = next(fragments(engine.deepspeed))
        flip(fragment.view(fragment.buffer.data), 0, 0)

    said = "step-00000004: its weights differ from those that the run saved$"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "restore", wrong)
        with pytest.raises(FailedError, match=said):
            run.train_in_group(joined_world(), load(path, [], RunConfig))


def test_weights_that_change_as_they_are_loaded_end_the_start(small_corpus, tmp_path):
    on_ranks(1, loaded_wrong, run_file(tmp_path, small_corpus, evaluation=[]))
