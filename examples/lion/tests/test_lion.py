"""Lion as a package offers it: its steps, its bits under ZeRO and across a resume, and the memory that is planned."""

import itertools

import pytest
import torch
from lion.settings import LionConfig

from data_pipeline.base.packages import example, missing_under
from pretrain import models
from pretrain.config.optimizers import OPTIMIZERS
from pretrain.engine import optimizers
from pretrain.engine.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.engine.optimizers.groups import kinds
from pretrain.tools.plan_memory import Parameters
from tests.conftest import TOP
from tests.support.exactness import MODELS, Case, build, largest_difference, measure
from tests.support.rank_processes import on_ranks
from tests.support.runs import losses, run_file, train_each
from tests.support.slow import slow
from tests.support.small_runs import engine_of, run_config


def test_lion_is_its_formula():
    """Algorithm 2 of Chen et al. 2023, one tensor at a time in fp64, without decay of norms and biases."""
    optimizer = {"name": "lion", "learning_rate": 1e-2, "weight_decay": 0.3, "betas": [0.8, 0.95]}
    run = run_config(model=MODELS["bart"], optimizer=optimizer)
    model = build(run)
    kind_of, ours = kinds(model), optimizers.build(model, run.optimizer)
    expected = {name: one.detach().double() for name, one in model.named_parameters()}
    momenta = {name: torch.zeros_like(one) for name, one in expected.items()}
    draws = torch.Generator().manual_seed(1)
    for step in range(10):
        for name, one in model.named_parameters():
            one.grad = torch.randn(one.shape, generator=draws) * 10.0 ** -(step % 4)
            one.grad[:1] = 0  # the sign of 0 is 0
            gradient, decay = one.grad.double(), 0.0 if kind_of[name] in ("norms", "biases") else 0.3
            update = torch.sign(0.8 * momenta[name] + 0.2 * gradient)
            expected[name] = expected[name] - 1e-2 * (update + decay * expected[name])
            momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
        ours.step()
    found = {name: one.detach().double() for name, one in model.named_parameters()}
    assert largest_difference(found, expected) < 1e-6


RUNS = {  # for each number of ranks
    1: [("t5", 1, "fp32"), ("t5", 3, "fp32")],
    2: [("bart", 1, "fp32"), ("t5 with muP", 2, "fp32"), ("bart", 3, "fp32"), ("t5", 2, "bf16"), ("t5", 3, "bf16")],
}


@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_sharded_steps_are_those_of_a_plain_loop(ranks):
    cases = [Case(model, "lion", stage, precision) for model, stage, precision in RUNS[ranks]]
    limits = {"fp32": 1e-5, "bf16": 2**-8}
    found = measure(ranks, cases, 4)
    assert {case: value for case, value in found.items() if not value <= limits[case.precision]} == {}


def state_of(run):
    """The parameters and momenta of the last checkpoint."""
    stored = StoredTensors(run / "checkpoints/step-00000006")
    return {(state, name): stored.whole(state, name) for name in stored.shapes for state in (PARAMETER, "momentum")}


@pytest.mark.slow
def test_a_run_has_the_same_bits_at_all_stages_and_across_a_resume(small_corpus, tmp_path):
    """Two ranks, six steps, and a run that is cut after the third. Clipping is off, since the last bit of the norm
    depends on the sharding; and a step is one micro-batch, since stage 3 adds them up after their reduction."""
    starts, paths = [], {}
    for stage, (name, stops) in itertools.product((1, 2, 3), (("whole", [None]), ("cut", [3, None]))):
        path = run_file(
            tmp_path / f"{name}-{stage}",
            small_corpus,
            stage,
            run={"max_steps": 6},
            batch={"global_batch_size": 8, "micro_batch_size": 4},
            optimizer={"name": "lion", "learning_rate": 1e-3, "weight_decay": 0.1, "gradient_clipping": 0},
            checkpoint={"every_steps": 3, "keep_last": 2},
            evaluation=[],
        )
        starts += [(path, stop) for stop in stops]
        paths[name, stage] = path
    assert train_each(2, starts) == [[0, 75, 0] * 3] * 2
    expected, of_steps = state_of(paths["whole", 1].parent / "run"), losses(paths["whole", 1])
    assert len(of_steps) == 6
    for case, path in paths.items():
        found = state_of(path.parent / "run")
        assert found.keys() == expected.keys(), case
        assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == [], case
        assert losses(path) == of_steps, case


def bytes_of_state(stage):
    """The bytes of state that a rank has after a step, and those that the settings say."""
    engine = engine_of(run_config(stage, optimizer={"name": "lion", "learning_rate": 1e-3}))
    for parameter in (one for group in engine.optimizer.param_groups for one in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    engine.optimizer.step()
    states = [value for of_buffer in engine.optimizer.state.values() for value in of_buffer.values()]
    found = sum(one.nbytes for one in states), engine.state_bytes
    engine.close()
    return found


def test_its_momentum_is_planned():
    """4 bytes for each parameter, half of AdamW's."""
    run = run_config(optimizer={"name": "lion", "learning_rate": 1e-3})
    planned = Parameters.of(models.meta_model(run.model), run)
    assert (planned.moments, planned.whole_moments, planned.step_bytes) == (4 * planned.count, 0, 4)
    assert planned.state == 8 * planned.count
    assert on_ranks(1, bytes_of_state, 1) == [(4 * planned.count, 4 * planned.count)]


def test_it_is_offered_and_missed_with_the_command_that_installs_it():
    assert OPTIMIZERS["lion"] is LionConfig
    way = f": pip install -e {TOP}/examples/lion"
    assert example("optimizers", "lion") == way
    missing = "no installed package offers 'lion' (entry point encdec_pretrain.optimizers)"
    assert missing_under(["optimizer"], "lion") == missing + way
