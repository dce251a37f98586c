"""Averages of checkpoints, and the moving average of a run's weights."""

import json
from pathlib import Path

import pytest
import torch

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from pretrain.checkpoint.directory import checkpoint_directory
from pretrain.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.checkpoint.trained import TrainedModel, average, save_weights
from pretrain.config import RunConfig
from pretrain.models import build
from pretrain.optimizers import AVERAGE
from tests.in_process import done_here, run_here
from tests.pretrain.forked import run_forked
from tests.pretrain.runs import run_file, train_each

DECAY, STEPS = 0.75, 4
OPTIMIZERS = {  # each with a stage of ZeRO
    "adamw": ({"name": "adamw"}, 3),
    "muon": ({"name": "muon", "newton_schulz_dtype": "fp32"}, 1),
    "adafactor": ({"name": "adafactor", "min_dim_size_to_factor": 16}, 2),
}


def average_file(folder, corpus, name):
    optimizer, stage = OPTIMIZERS[name]
    return run_file(
        folder,
        corpus,
        stage,
        run={"max_steps": STEPS},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        optimizer={"learning_rate": 1e-2, **optimizer, "ema_decay": DECAY},
        checkpoint={"every_steps": 1, "keep_last": STEPS},
        evaluation=[],
    )


@pytest.fixture(scope="module")
def runs(small_corpus, tmp_path_factory) -> Path:
    """A run with AdamW; "resumed" is the same, but stops after two steps and goes on."""
    folder = tmp_path_factory.mktemp("averages")
    whole, resumed = (average_file(folder / name, small_corpus, "adamw") for name in ("adamw", "resumed"))
    train_each(2, [(whole, None), (resumed, 2), (resumed, None)])
    return folder


def stored(runs, name, step):
    return StoredTensors(checkpoint_directory(runs / name / "run", step))


@pytest.mark.slow
def test_the_moving_average_is_that_of_the_parameters_after_each_step(small_corpus, tmp_path):
    train_each(2, [(average_file(tmp_path / name, small_corpus, name), None) for name in OPTIMIZERS])
    for name in OPTIMIZERS:
        saved = [stored(tmp_path, name, step) for step in range(1, STEPS + 1)]
        for parameter in saved[0].shapes:
            expected = saved[0].whole(PARAMETER, parameter)
            for one in saved:
                values = one.whole(PARAMETER, parameter)
                expected = DECAY * expected + (1 - DECAY) * values
                torch.testing.assert_close(one.whole(AVERAGE, parameter), expected, rtol=1e-6, atol=1e-8)
            assert not torch.equal(expected, values), (name, parameter)


def test_a_resumed_run_has_the_same_moving_average_to_the_bit(runs):
    whole, resumed = (stored(runs, name, STEPS) for name in ("adamw", "resumed"))
    for parameter in whole.shapes:
        assert torch.equal(whole.whole(AVERAGE, parameter), resumed.whole(AVERAGE, parameter))


def test_an_average_is_one_runs_from_its_start_and_not_on_nvme(runs, small_corpus, tmp_path):
    done = run_forked("train", runs / "adamw/run.yaml", "optimizer.ema_decay=0.5")
    assert (done.returncode, "optimizer.ema_decay" in done.stderr) == (2, True)
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    optimizer = {"learning_rate": 1e-2, "ema_decay": 0.5}
    path = run_file(tmp_path, small_corpus, optimizer=optimizer, deepspeed={"zero_optimization": zero})
    with pytest.raises(UserError, match=r"optimizer\.ema_decay: DeepSpeed keeps no further states on NVMe"):
        load(path, [], RunConfig)


def test_the_last_checkpoints_of_a_run_are_averaged(runs, tmp_path):
    run = runs / "adamw/run"
    done_here("pretrain", "average", run, tmp_path / "mean", "--last", "3")
    mean = StoredTensors(tmp_path / "mean")
    mean.verify()
    assert mean.index.step == STEPS
    for parameter in mean.shapes:
        expected = sum(stored(runs, "adamw", step).whole(PARAMETER, parameter).double() for step in (2, 3, 4)) / 3
        assert torch.equal(mean.whole(PARAMETER, parameter), expected.float())
        assert mean.states(parameter) == []
    TrainedModel.open(tmp_path / "mean")
    printed = done_here("pretrain", "evaluate", tmp_path / "mean", "--hook", "validation_loss", "--json")
    assert json.loads(printed)["validation/small/loss"] > 0
    assert run_here("pretrain", "export", tmp_path / "mean", tmp_path / "out").returncode == 0
    assert "the mean of the weights after steps 2, 3, 4" in (tmp_path / "out/README.md").read_text()
    done = run_here("pretrain", "average", run, tmp_path / "more", "--last", "5")
    assert (done.returncode, "the run has 4 checkpoints" in done.stderr) == (2, True)


def test_the_moving_average_becomes_a_checkpoint(runs, tmp_path):
    assert run_here("pretrain", "average", runs / "adamw/run", tmp_path / "ema", "--ema").returncode == 0
    made, source = StoredTensors(tmp_path / "ema"), stored(runs, "adamw", STEPS)
    for parameter in made.shapes:
        assert torch.equal(made.whole(PARAMETER, parameter), source.whole(AVERAGE, parameter))
    done = run_here("pretrain", "average", tmp_path / "ema", tmp_path / "again", "--ema")
    assert (done.returncode, "has no moving average" in done.stderr) == (2, True)


def test_other_models_are_refused_in_one_line(runs, tmp_path):
    one = TrainedModel.open(checkpoint_directory(runs / "adamw/run", STEPS))
    wider = build(one.model.config.model_copy(update={"d_ff": 96}))
    save_weights(wider.config, wider.state_dict(), one.tokenizer, tmp_path / "wider")
    with pytest.raises(UserError, match=r"wider: not of the same model as .*model\.d_ff") as refused:
        average([checkpoint_directory(runs / "adamw/run", STEPS), tmp_path / "wider"], tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
    done = run_here("pretrain", "average", tmp_path / "out")
    assert (done.returncode, "give checkpoints, or a run, and then a new directory" in done.stderr) == (2, True)
