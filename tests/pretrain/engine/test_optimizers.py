"""Optimizers compared with independent implementations, sharded ones with unsharded ones; groups and schedules."""

import fnmatch
import itertools
import math

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError, UserError
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.optimizers import OPTIMIZERS as KNOWN
from pretrain.engine import optimizers
from pretrain.engine.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.engine.deepspeed_private import Fragment
from pretrain.engine.engine import set_rates
from pretrain.engine.optimizers import flat_buffers
from pretrain.engine.optimizers.adafactor import _SecondMoments, tiles
from pretrain.engine.optimizers.flat_buffers import FlatBuffer
from pretrain.engine.optimizers.groups import kinds, parameter_groups, problems
from pretrain.engine.optimizers.muon import balanced, orthogonal
from pretrain.tools.plan_memory import LiveMemory
from tests.support.exactness import MODELS, OPTIMIZERS, Case, build, largest_difference, measure
from tests.support.rank_processes import each as call_each
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file, train_each
from tests.support.slow import slow
from tests.support.small_models import as_at_the_start
from tests.support.small_runs import engine_of, run_config
from tests.support.tables import each


def settings(model: str = "t5", schedule: object = None, **optimizer: object) -> RunConfig:
    """A run file with the given `optimizer` section."""
    return run_config(
        model=MODELS[model],
        optimizer={"learning_rate": 1e-2, **optimizer},
        schedule={"name": "constant"} if schedule is None else schedule,
    )


def stepped(run: RunConfig, theirs: object, steps: int = 10, device: str = "cpu") -> float:
    """The largest relative difference of a parameter after steps with the same random gradients, some tiny, some zero.

    `theirs(model)` returns the reference optimizers for a copy of the model.
    """
    ours, copy = build(run, device), build(run, device)
    optimizer, others = optimizers.build(ours, run.optimizer), theirs(copy)
    draws = torch.Generator().manual_seed(1)
    for step in range(steps):
        for one, other in zip(ours.parameters(), copy.parameters(), strict=True):
            gradient = torch.randn(one.shape, generator=draws).to(device) * 10.0 ** -(step % 4)
            gradient[:1] = 0
            one.grad, other.grad = gradient, gradient.clone()
        for one in [optimizer, *others]:
            one.step()
    return largest_difference(dict(ours.named_parameters()), dict(copy.named_parameters()))


def of_kind(model: nn.Module, *wanted: str) -> list[nn.Parameter]:
    found = kinds(model)
    return [parameter for name, parameter in model.named_parameters() if found[name] in wanted]


def test_adamw_is_torchs_with_decay_for_all_but_norms_and_biases(device):
    def theirs(model):
        common = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "foreach": False}
        decayed = torch.optim.AdamW(of_kind(model, "embeddings", "matrices"), weight_decay=0.3, **common)
        return [decayed, torch.optim.AdamW(of_kind(model, "norms", "biases"), weight_decay=0.0, **common)]

    assert stepped(settings("bart", betas=[0.8, 0.95], eps=1e-7, weight_decay=0.3), theirs, device=device) < 1e-6


@each("scaled", [True, False])
def test_adafactor_is_that_of_transformers(scaled, device):
    """transformers' factors every matrix, and also scales weight decay by the parameter's scale: there is none here."""

    def theirs(model):
        given = {"relative_step": False, "scale_parameter": scaled}
        return [transformers.Adafactor(model.parameters(), lr=1e-2, weight_decay=0.0, **given)]

    run = settings(name="adafactor", min_dim_size_to_factor=1, multiply_by_parameter_scale=scaled)
    assert stepped(run, theirs, device=device) < 1e-6


def test_adafactor_factors_large_matrices_alone_and_decays_by_the_bare_rate():
    model = nn.ModuleDict({"large": nn.Linear(128, 130, bias=False), "small": nn.Linear(127, 500, bias=False)})
    before = model.large.weight.detach().clone()
    run = settings(name="adafactor", weight_decay=0.1)
    optimizer = optimizers.build(model, run.optimizer)
    model.large.weight.grad = torch.zeros(130, 128)
    optimizer.step()
    shapes = {name: {part: tuple(v.shape) for part, v in of.items()} for name, of in optimizer.factored_state().items()}
    assert shapes == {
        "large.weight": {"exp_avg_sq_row": (130,), "exp_avg_sq_col": (128,)},
        "small.weight": {"exp_avg_sq": (500 * 127,)},
    }
    torch.testing.assert_close(model.large.weight.detach(), before * (1 - 1e-2 * 0.1))


def test_second_moments_of_vectors_are_at_the_places_of_their_elements():
    """A rank has none of the first parameter, and the last three of the six elements of the second."""
    config, buffer = settings(name="adafactor").optimizer, torch.zeros(3)
    fragments = [Fragment("a", (5,), 0, 0, buffer, 0), Fragment("b", (6,), 3, 3, buffer, 0)]
    sums = _SecondMoments(FlatBuffer(buffer, fragments), config).sums(torch.tensor([1.0, 2.0, 3.0]))
    assert sums.tolist() == [0.0] * 8 + [1.0, 4.0, 9.0]


@each("state", [{}, {"exp_avg_sq_row": 130}, {"exp_avg_sq_row": 130, "exp_avg_sq_col": 127}])
def test_a_state_without_a_factor_or_with_one_of_another_size_is_refused(state):
    model = nn.ModuleDict({"large": nn.Linear(128, 130, bias=False)})
    optimizer = optimizers.build(model, settings(name="adafactor").optimizer)
    optimizer.step()
    found = {"large.weight": {part: torch.zeros(size) for part, size in state.items()}}
    with pytest.raises(FailedError, match=r"^the checkpoint has no exp_avg_sq_\w+ of large\.weight in the shape"):
        optimizer.set_factored_state(found)


@each("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_muon_is_torchs_for_matrices_and_torchs_adamw_for_all_else(adjust_lr_fn, device, monkeypatch):
    """Both in fp32: where torch's rounds to bf16 depends on the CPU."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)

    def theirs(model):
        muon = {"lr": 1e-2, "weight_decay": 0.3, "momentum": 0.9, "adjust_lr_fn": adjust_lr_fn}
        others = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7, "foreach": False}
        return [
            torch.optim.Muon(of_kind(model, "matrices"), **muon),
            torch.optim.AdamW(of_kind(model, "embeddings"), weight_decay=0.3, **others),
            torch.optim.AdamW(of_kind(model, "norms", "biases"), weight_decay=0.0, **others),
        ]

    matrices = {"momentum": 0.9, "adjust_lr_fn": adjust_lr_fn, "newton_schulz_dtype": "fp32"}
    others = {"adamw_learning_rate": 3e-3, "betas": [0.8, 0.95], "eps": 1e-7}
    run = settings("bart", name="muon", weight_decay=0.3, **matrices, **others)
    assert stepped(run, theirs, steps=3, device=device) < 1e-5


def test_adamw_scale_is_its_formula(device):
    """nanoT5's formula, one tensor at a time in fp64."""

    class Formula:
        def __init__(self, parameters, decay):
            self.state = [(p, torch.zeros_like(p).double(), torch.zeros_like(p).double()) for p in parameters]
            self.decay, self.count = decay, 0

        def step(self):
            self.count += 1
            for p, first, second in self.state:
                gradient = p.grad.double()
                first.mul_(0.9).add_(0.1 * gradient)
                second.mul_(0.999).add_(0.001 * gradient**2)
                rms = max(1e-3, float(p.detach().double().square().mean().sqrt()))
                rate = 1e-2 * math.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
                moved = p.detach().double() - rate * rms * first / (second.sqrt() + 1e-6)
                p.data.copy_(moved - 1e-2 * self.decay * moved)

    def theirs(model):
        decayed = of_kind(model, "embeddings", "matrices")
        return [Formula(decayed, 0.3), Formula(of_kind(model, "norms", "biases"), 0.0)]

    assert stepped(settings("bart", name="adamw_scale", weight_decay=0.3), theirs, device=device) < 1e-6


FP32, BF16 = "fp32", "bf16"
RUNS = {  # for each number of ranks; there, those of all optimizers
    1: [("t5", 1, FP32), ("t5", 3, FP32)],
    2: [
        ("bart", 1, FP32),
        ("bart", 3, FP32),
        ("t5", 2, BF16),
        ("t5", 3, BF16),
        ("t5", 2, FP32, True),
        ("t5", 3, BF16, True),
        ("t5 with muP", 2, FP32),
        ("t5 with muP", 3, FP32),
    ],
    4: [("t5", 2, FP32), ("t5", 3, FP32)],
}


@pytest.mark.parametrize("ranks", [1, *slow(2, 4)])
def test_sharded_steps_are_those_of_a_plain_loop(ranks, device):
    """Checks part of the table of exactness.py, which explains reasons and limits."""
    cases = [Case(model, name, *run) for name in OPTIMIZERS for model, *run in RUNS[ranks]]
    limits = {"fp32": 1e-5, "bf16": 2**-8}
    found = measure(ranks, cases, 4, device)
    assert {case: value for case, value in found.items() if not value <= limits[case.precision]} == {}


def bytes_taken(name: str) -> tuple[int, int, float]:
    """(bytes of the sharded state, those that the settings say, the most bytes of temporary tensors in a step for each
    element), with one flat buffer as on a GPU."""
    flat_buffers.IN_PARTS = frozenset()
    wide = {"d_model": 128, "d_ff": 512, "d_kv": 32, "num_heads": 4}
    engine = engine_of(run_config(1, wide, optimizer={"name": name, "learning_rate": 1e-3}))
    optimizer, config = engine.optimizer, engine.config.optimizer
    buffers = [one for group in optimizer.param_groups for one in group["params"]]
    for _ in range(2):  # the first makes the state
        for buffer in buffers:
            buffer.grad = torch.randn_like(buffer)
        held = [value for state in optimizer.state.values() for value in state.values()]
        with LiveMemory("cpu", [*buffers, *(one.grad for one in buffers), *held]) as memory:
            optimizer.step()
    kind_of = kinds(engine.module)
    said = sum(config.state_bytes(kind_of[name], tuple(one.shape)) for name, one in engine.module.named_parameters())
    engine.close()
    return sum(one.nbytes for one in held if one.dim()), said, memory.peak / max(one.numel() for one in buffers)


def test_state_and_steps_take_what_the_settings_say():
    """What Muon and Adafactor take in a step depends on how many matrices have one shape."""
    found = on_ranks(1, call_each, bytes_taken, [(name,) for name in KNOWN])[0]
    for (name, settings), (state, said, of_step) in zip(KNOWN.items(), found, strict=True):
        assert state == said, name
        if name not in ("muon", "adafactor"):
            assert of_step == pytest.approx(settings.step_bytes, rel=0.1, abs=0.1), name


def test_a_fragment_of_a_matrix_is_made_of_rectangles():
    whole = torch.arange(35.0).view(7, 5)
    for start in range(35):
        for size in range(36 - start):
            buffer = torch.cat([torch.zeros(3), whole.flatten()[start : start + size]])
            seen = torch.zeros_like(whole)
            found = tiles(FlatBuffer(buffer, [Fragment("a", (7, 5), start, size, buffer, 3)]), [0])
            for tile in found:
                assert torch.equal(tile.view(buffer), whole[tile.rows, tile.columns])
                seen[tile.rows, tile.columns] += 1
            assert torch.equal(seen.flatten().nonzero().flatten(), torch.arange(start, start + size))
            assert len(found) <= 3


def test_a_flat_buffer_has_the_part_of_a_parameter_that_is_inside():
    """A parameter of 6 elements that begins before, in, or behind a buffer of 10."""
    buffer = torch.zeros(10)
    found = [Fragment.inside("a", (2, 3), place, buffer) for place in (-6, -5, -1, 0, 4, 5, 9, 10)]
    assert [(one.start, one.size, one.offset) for one in found] == [
        (0, 0, 0),
        (5, 1, 0),
        (1, 5, 0),
        (0, 6, 0),
        (0, 6, 4),
        (0, 5, 5),
        (0, 1, 9),
        (0, 0, 0),
    ]


def test_each_parameters_factor_is_spread_over_its_elements_and_padding_has_0():
    """A rank without the first parameter has parts of two others, with padding before, between and behind them."""
    buffer = torch.zeros(9)
    places = [(0, 0), (2, 2), (3, 5)]  # sizes and offsets
    fragments = [Fragment(str(number), (4,), 0, *one[:1], buffer, one[1]) for number, one in enumerate(places)]
    found = FlatBuffer(buffer, fragments).spread(torch.tensor([1.0, 2.0, 3.0]))
    assert found.tolist() == [0, 0, 2, 2, 0, 3, 3, 3, 0]


def test_matrices_are_shared_out_by_cost():
    assert balanced([5, 1, 4, 3, 2], 2) == [[0, 4, 1], [2, 3]]
    assert balanced([1.0], 3) == [[0], [], []]


def test_kinds_of_parameters():
    t5 = kinds(models.build(settings().model))
    assert t5["embedding.weight"] == "embeddings"  # tied, so that no output is left
    assert "lm_head.weight" not in t5
    assert t5["decoder.relative_attention_bias.weight"] == "embeddings"
    assert t5["encoder.final_norm.weight"] == "norms"
    assert set(t5.values()) == {"embeddings", "norms", "matrices"}
    untied = models.build(settings().model.model_copy(update={"tie_embeddings": False}))
    assert kinds(untied)["lm_head.weight"] == "output"
    found = kinds(as_at_the_start("bert"))
    assert {name for name, kind in found.items() if kind == "embeddings"} == {
        "embedding.weight",
        "encoder.positions.weight",
        "encoder.token_types.weight",
    }
    assert found["lm_head.bias"] == found["encoder.layers.0.attention.q.bias"] == "biases"
    assert found["encoder.embedding_norm.bias"] == "norms"


def test_the_first_group_that_matches_a_parameter_has_it():
    groups = [
        {"match": ["norms", "biases"], "weight_decay": 0.0},
        {"match": ["decoder.*.feed_forward.*"], "learning_rate": 1e-3},
        {"match": ["embeddings", "decoder.*"], "learning_rate": 1e-3},
    ]
    run = settings("bart", weight_decay=0.1, groups=groups)
    found = parameter_groups(build(run), run.optimizer)
    assert [(group["base_rate"], group["weight_decay"]) for group in found] == [(1e-2, 0.1), (1e-3, 0.1), (1e-2, 0.0)]
    names = [[name for name, _ in group["params"]] for group in found]
    assert all(name.startswith("encoder.layers") and name.endswith("weight") for name in names[0])
    assert {"embedding.weight", "decoder.layers.0.feed_forward.wi.weight"} < set(names[1])
    assert {"decoder.layers.0.feed_forward.wi.bias", "decoder.inputs.norm.weight"} < set(names[2])
    assert sum(map(len, names)) == len(list(build(run).named_parameters()))


def test_equal_settings_make_one_group():
    assert len(parameter_groups(build(settings()), settings().optimizer)) == 1
    muon = settings(name="muon", weight_decay=0.1).optimizer
    found = parameter_groups(build(settings()), muon)
    assert [(group["algorithm"], group["weight_decay"]) for group in found] == [
        ("muon", 0.1),
        ("adamw", 0.1),
        ("adamw", 0.0),
    ]


def rate_factor(run: RunConfig, step: int) -> float:
    return run.schedule.factor(step, run.run.max_steps, run.optimizer.learning_rate)


def test_a_group_has_the_schedule_of_its_own_rate():
    groups = [{"match": ["embeddings"], "learning_rate": 1e-3}]
    schedule = {"name": "cosine", "warmup_steps": 10, "final_learning_rate": 2e-3}
    run = settings(schedule=schedule, groups=groups)
    optimizer = optimizers.build(build(run), run.optimizer)
    for step in (0, 9, 50, 99):
        set_rates(optimizer, run, step)
        factor = rate_factor(run, step)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2 * factor, 1e-3 * factor]
    assert [rate_factor(run, step) for step in (0, 9, 99)] == [1 / 10, 1, 2e-3 / 1e-2]


def test_a_group_that_matches_nothing_is_refused():
    groups = [
        {"match": ["norms", "biases"], "weight_decay": 0.0},
        {"match": ["*.layers.7.*", "embedings"], "learning_rate": 1e-3},
        {"match": ["encoder.final_norm.weight"], "learning_rate": 1e-3},
    ]
    run = settings(groups=groups)
    found = problems(models.meta_model(run.model), run.optimizer)
    kinds_are = "matches no remaining parameter; kinds are norms, biases, embeddings, output, matrices"
    assert found == [
        f"optimizer.groups.0.match.1: 'biases' {kinds_are}",
        f"optimizer.groups.1.match.0: '*.layers.7.*' {kinds_are}",
        f"optimizer.groups.1.match.1: 'embedings' {kinds_are}",
        f"optimizer.groups.2.match.0: 'encoder.final_norm.weight' {kinds_are}",
    ]
    with pytest.raises(UserError) as error:
        optimizers.build(build(run), run.optimizer)
    assert str(error.value).splitlines() == found


def rates(schedule: dict[str, object], *steps: int) -> list[float]:
    return rates_of(settings(schedule=schedule), *steps)


def rates_of(run: RunConfig, *steps: int) -> list[float]:
    return [run.optimizer.learning_rate * rate_factor(run, step) for step in steps]


def test_schedules():
    """Each schedule has a peak of 1e-2 and 100 steps."""
    linear = {"name": "linear", "warmup_steps": 20, "final_learning_rate": 2e-3}
    assert rates(linear, 9, 19, 59, 99) == pytest.approx([5e-3, 1e-2, 6e-3, 2e-3])
    stable = {"name": "warmup_stable_decay", "warmup_steps": 20, "decay_steps": 40, "final_learning_rate": 2e-3}
    assert rates(stable, 9, 19, 40, 59, 69, 99) == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2, 8e-3, 2e-3])
    assert rates({**stable, "decay_shape": "one_minus_sqrt"}, 59, 69, 99) == pytest.approx([1e-2, 6e-3, 2e-3])
    assert rates({"name": "constant", "warmup_steps": 20}, 9, 19, 99) == pytest.approx([5e-3, 1e-2, 1e-2])
    assert rates({"warmup_steps": 20}, 59) == rates({"name": "cosine", "warmup_steps": 20}, 59) == [5e-3]


@each("name", ["cosine", "linear"])
def test_a_decay_may_reach_beyond_the_run_or_end_before_it(name):
    """The rate is half-way down at half of the horizon; a run of 100 steps sees the first part, or the end and what
    follows."""
    schedule = {"name": name, "warmup_steps": 20, "final_learning_rate": 2e-3}
    assert rates({**schedule, "until_step": 180}, 99) == pytest.approx([6e-3])
    assert rates({**schedule, "until_step": 60}, 39, 59, 99) == pytest.approx([6e-3, 2e-3, 2e-3])
    assert rates(schedule, 59) == rates({**schedule, "until_step": 100}, 59)


PUBLISHED_RATES = {
    # Raffel et al. 2020, section 3.1.2
    "t5-v1.1-base-c4": lambda n: max(n, 10_000) ** -0.5,
    "t5-v1.1-base-nanot5": lambda n: min(
        2e-2 * n / 10_000, 1e-5 + (2e-2 - 1e-5) * (1 + math.cos(math.pi * (n - 10_000) / (65_536 - 10_000))) / 2
    ),
    # Vaswani et al. 2017, section 5.3
    "transformer-base-wmt14": lambda n: 512**-0.5 * min(n**-0.5, n * 4000**-1.5),
    # Devlin et al. 2018, appendix A.2: warm-up, then a linear decay; a tenth of the steps here
    "bert-base-c4": lambda n: 1e-4 * min(n / 1000, (100_000 - n) / (100_000 - 1000)),
}


@each("run_file, rate", PUBLISHED_RATES.items())
def test_shipped_recipes_have_the_published_rates(run_file, rate):
    run = load(f"configs/runs/{run_file}.yaml", [], RunConfig)
    steps = [step for step in (0, 99, 299, 300, 3_999, 4_000, 9_999, 37_767, 50_000) if step < run.run.max_steps]
    steps.append(run.run.max_steps - 1)
    expected = [rate(step + 1) for step in steps]
    assert rates_of(run, *steps) == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_the_recipe_of_t5_has_its_z_loss():
    """Raffel et al.'s is that of Mesh TensorFlow, 1e-4; nanoT5 trains without."""
    for name, z_loss in {"c4": 1e-4, "wikipedia": 1e-4, "nanot5": 0.0}.items():
        assert load(f"configs/runs/t5-v1.1-base-{name}.yaml", [], RunConfig).model.z_loss == z_loss, name


WRONG_OPTIMIZERS = [
    ({"nesterov": True}, "optimizer.nesterov: unknown key"),
    ({"name": "muon", "ns_stesp": 5}, "optimizer.ns_stesp: unknown key; nearest valid key: optimizer.ns_steps"),
    ({"name": "muon", "adjust_lr_fn": "original"}, "optimizer: adjust_lr_fn: original needs an adamw_learning_rate"),
    ({"name": "adam"}, "'adam'"),
    ({"groups": [{"match": ["norms"]}]}, "optimizer.groups.0: sets neither learning_rate nor weight_decay"),
    ({"groups": [{"match": [], "weight_decay": 0}]}, "optimizer.groups.0.match"),
    ({"betas": [0.9, 1.0]}, "optimizer.betas.1"),
]
WRONG_SCHEDULES = [
    ({"name": "inverse_square_root", "final_learning_rate": 0}, "schedule.final_learning_rate: unknown key"),
    ({"name": "warmup_stable_decay"}, "schedule.decay_steps: missing"),
    ({"name": "cosine", "warmup": "linear"}, "schedule.warmup: unknown key"),
    ({"warmup_steps": 50, "until_step": 50}, "schedule: until_step 50 is not after 50 warmup_steps"),
    (
        {"name": "warmup_stable_decay", "warmup_steps": 50, "decay_steps": 51},
        "schedule: 50 warmup_steps and 51 decay_steps exceed run.max_steps 100",
    ),
]


@each(
    "sections, expected",
    [*WRONG_OPTIMIZERS, *(({"schedule": schedule}, expected) for schedule, expected in WRONG_SCHEDULES)],
)
def test_wrong_options_are_refused_by_their_keys(sections, expected):
    with pytest.raises(UserError) as error:
        settings(**sections)
    assert expected in str(error.value)


# Parameters that stay as they are for the first steps, under every ZeRO stage and across a resume


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
        ({"match": ["decoder.layer.*"], "until_step": 2}, "optimizer.freeze.match.0: 'decoder.layer.*' matches no"),
        ({"match": ["*"], "but": ["heads"], "until_step": 2}, "optimizer.freeze.but.0: 'heads' matches no parameter"),
        ({"match": ["*"], "until_step": 2}, "optimizer.freeze: all parameters are frozen"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(freeze, expected):
    run = settings(freeze=freeze)
    (problem,) = problems(models.meta_model(run.model), run.optimizer)
    assert problem.startswith(expected)


def test_the_norm_of_a_large_flat_buffer_is_that_in_fp64_without_a_copy_in_fp64(monkeypatch):
    """A norm in one fp32 sum would be off by 1e-4 and more; a copy in fp64 would have twice its bytes."""
    values = torch.randn(25_000_000, generator=torch.Generator().manual_seed(0))
    expected = float(values.double().square().sum())
    with monkeypatch.context() as patch:
        patch.setattr(flat_buffers, "IN_PARTS", frozenset())  # as on a GPU
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
            assert float(flat_buffers.sum_of_squares(values)) == pytest.approx(expected, rel=1e-6)
    assert max(event.self_cpu_memory_usage for event in profiled.events()) < 1_000_000
    assert float(flat_buffers.sum_of_squares(values)) == pytest.approx(expected, rel=1e-12)


@each("shape", [(4, 64), (64, 4), (8, 8)])
def test_a_matrix_is_made_orthogonal_by_products_with_its_shorter_side(shape):
    """A step has two products of the shorter side squared by the longer side, and one of the shorter side cubed."""
    least, most = sorted(shape)
    with FlopCounterMode(display=False) as counted:
        orthogonal(torch.ones(shape), 5)
    assert counted.get_total_flops() == 2 * 5 * least * least * (2 * most + least)


def test_orthogonal_matrices_in_bf16_are_near_to_those_in_fp32():
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, precise = orthogonal(matrix, 5).float(), orthogonal(matrix.float(), 5)
    assert (found - precise).abs().max() < 0.05
