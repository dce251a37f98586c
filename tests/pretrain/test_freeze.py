"""Parameters that stay as they are for the first steps, under every ZeRO stage and across a resume."""

import fnmatch
import itertools

import pytest
import torch

from data_pipeline.foundation.errors import UserError
from pretrain import models
from pretrain.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.optimizers.groups import parameter_groups, problems
from tests.pretrain.runs import run_file, train_each
from tests.pretrain.small_runs import run_config
from tests.tables import each

CROSS = "decoder.layers.*.cross_attention*"
FREEZE = {"match": ["*"], "but": [CROSS], "until_step": 2}


def parameters(run, step):
    stored = StoredTensors(run / f"checkpoints/step-{step:08d}")
    return {name: stored.whole(PARAMETER, name) for name in stored.shapes}


@pytest.mark.parametrize("stages", [(3,), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_frozen_parameters_keep_their_bits_and_a_resume_repeats_them(small_corpus, tmp_path, stages):
    """Two ranks, two frozen steps of four, and a run that is cut after the first."""
    starts, runs = [], {}
    for stage, (name, stops) in itertools.product(stages, (("whole", [None]), ("cut", [1, None]))):
        path = run_file(
            tmp_path / f"{name}-{stage}",
            small_corpus,
            stage,
            run={"max_steps": 4},
            optimizer={"learning_rate": 1e-2, "weight_decay": 0.1, "gradient_clipping": 0.5, "freeze": FREEZE},
            schedule={"name": "constant"},
            checkpoint={"every_steps": 1, "keep_last": 4},
            evaluation=[],
        )
        starts += [(path, stop) for stop in stops]
        runs[name, stage] = path.parent / "run"
    assert train_each(2, starts) == [[0, 75, 0] * len(stages)] * 2
    for stage in stages:
        first, before, after = (parameters(runs["whole", stage], step) for step in (1, 2, 3))
        for name, tensor in first.items():
            frozen = not fnmatch.fnmatchcase(name, CROSS)
            assert torch.equal(tensor, before[name]) == frozen, name
            assert not torch.equal(before[name], after[name]), name
        whole, cut = (parameters(runs[name, stage], 4) for name in ("whole", "cut"))
        assert all(torch.equal(cut[name], tensor) for name, tensor in whole.items())


@each(
    "freeze, expected",
    [
        ({"match": ["decoder.layer.*"], "until_step": 2}, "optimizer.freeze.match.0: 'decoder.layer.\\*' matches no"),
        ({"match": ["*"], "but": ["heads"], "until_step": 2}, "optimizer.freeze.but.0: 'heads' matches no parameter"),
        ({"match": ["*"], "until_step": 2}, "all parameters are frozen"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(freeze, expected):
    config = run_config(optimizer={"learning_rate": 1e-2, "freeze": freeze})
    model = models.outline(config.model)
    assert len(problems(model, config.optimizer)) == 1
    with pytest.raises(UserError, match=expected):
        parameter_groups(model, config.optimizer)
