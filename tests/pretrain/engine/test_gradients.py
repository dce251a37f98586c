"""The gradient of a step: when it is clipped, which rates it is applied with, and how it is computed again."""

from typing import Any

import pytest
import torch

from tests.support.rank_processes import each as each_on_ranks
from tests.support.rank_processes import on_ranks
from tests.support.small_runs import engine_of, micro_batches, own_layout, own_sharding, row_offsets, run_config


def after_a_step(clipping: float) -> tuple[str, float]:
    """The fingerprint of the weights after a step, and the norm of its gradient before clipping."""
    from pretrain.engine.checkpoint.engine_state import fingerprint_of_masters

    optimizer = {"learning_rate": 1e-2, "gradient_clipping": clipping}
    engine, layout = engine_of(run_config(1, optimizer=optimizer)), own_layout()
    engine.step(0, row_offsets(layout, 0), micro_batches(layout, 0))
    found = fingerprint_of_masters(engine), engine.gradient_norm
    engine.close()
    return found


def test_a_gradient_below_the_limit_is_not_clipped():
    ((unlimited, below, clipped),) = on_ranks(1, each_on_ranks, after_a_step, [(0.0,), (1e9,), (1e-6,)])
    assert unlimited == below
    assert unlimited[0] != clipped[0]
    assert 1e-6 < unlimited[1] == clipped[1] < 1e9


def clipped_update(scale: float, limit: float, rate: float) -> tuple[float, float, float]:
    """The L2 norm of the change that plain SGD makes at `rate` with the gradient of `scale` times the loss, clipped at
    `limit`; that of the gradient before clipping; and the loss of a step without labels."""
    from pretrain.engine.construction import construct
    from pretrain.engine.engine import Engine

    config = run_config(1, optimizer={"learning_rate": rate, "gradient_clipping": limit})
    sharding, layout = own_sharding(config), own_layout()
    model = construct(config, config.model, sharding)
    group = {"params": [*model.parameters()], "base_rate": rate, "frozen_until": 0}
    engine = Engine.initialize(model, config, sharding, optimizer=torch.optim.SGD([group], lr=rate))
    engine.module.register_forward_hook(lambda *given: {name: scale * loss for name, loss in given[2].items()})
    before = [parameter.detach().double() for parameter in engine.module.parameters()]
    engine.step(0, row_offsets(layout, 0), micro_batches(layout, 0))
    after, norm = [parameter.detach().double() for parameter in engine.module.parameters()], engine.gradient_norm
    empty = micro_batches(layout, 1)
    for batch in empty:
        batch["labels"].fill_(-100)
    loss = engine.step(1, row_offsets(layout, 1), empty).loss
    engine.close()
    change = torch.cat([(one - other).flatten() for one, other in zip(after, before, strict=True)])
    return float(change.norm()), norm, loss


def test_a_clipped_gradient_has_the_limit_as_its_norm_as_pytorch_clips():
    """`clip_grad_norm_` divides by the norm plus 1e-6, which is half of the divisor of a gradient as small."""
    cases = [(1.0, 0.5, 1.0), (1e-6, 1e-7, 1e6)]
    ((usual, small),) = on_ranks(1, each_on_ranks, clipped_update, cases)
    for (change, norm, empty), (_, limit, rate) in zip((usual, small), cases, strict=True):
        assert norm > limit
        assert change == pytest.approx(rate * limit * norm / (norm + 1e-6), rel=1e-3)
        assert empty == 0.0
    assert small[1] < 1e-5


def whole_and_buffers(stage: int) -> tuple[bool, int, int]:
    """Whether the whole model is the engine's own, its elements, and those of all ranks' flat buffers."""
    engine = engine_of(run_config(stage))
    with engine.whole() as model:
        own, elements = model is engine.module, sum(one.numel() for one in model.parameters())
    buffers = engine.flat_buffers()
    held = sum(fragment.size for buffer in buffers for fragment in buffer.fragments)
    engine.close()
    return own, elements, held


def test_the_whole_model_is_a_copy_only_where_weights_are_sharded_and_buffers_hold_each_element_once():
    ranks = on_ranks(2, each_on_ranks, whole_and_buffers, [(1,), (3,)])
    for stage, of_ranks in zip((1, 3), zip(*ranks, strict=True), strict=True):
        elements = of_ranks[0][1]
        assert [one[:2] for one in of_ranks] == [(stage == 1, elements)] * 2
        assert sum(one[2] for one in of_ranks) == elements > 10_000


def test_each_group_has_its_own_rate_which_follows_the_schedule_and_is_0_while_the_group_is_frozen():
    from pretrain.engine.engine import set_rates

    config = run_config(schedule={"name": "constant", "warmup_steps": 10})
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "base_rate": base, "frozen_until": frozen_until}
        for base, frozen_until in ((1e-2, 0), (3e-3, 0), (1e-2, 5))
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    rates: dict[int, list[float]] = {}
    for step in (4, 5, 20):
        found = set_rates(optimizer, config, step)
        rates[step] = [found, *(group["lr"] for group in optimizer.param_groups)]
    assert 0 < rates[4][0] < rates[5][0] < rates[20][0] == 1e-2
    for step, (own, usual, other, frozen) in rates.items():
        assert (usual, other) == pytest.approx((own, 0.3 * own))
        assert frozen == (0.0 if step < 5 else own)


def replayed() -> tuple[bool, list[torch.Tensor]]:
    """Whether random numbers are as before, and a parameter's gradient: of a micro-batch that is computed again before
    its step, and of the step's first."""
    engine, layout = engine_of(run_config(1, model={"dropout_rate": 0.1})), own_layout()
    batches, offsets = micro_batches(layout, 0), row_offsets(layout, 0)
    found: list[torch.Tensor] = []
    next(engine.module.parameters()).register_hook(lambda gradient: found.append(gradient.clone()))
    before = torch.get_rng_state()
    engine.replay(0, offsets[0], batches[0], engine.counted(batches))
    after = torch.get_rng_state()
    engine.step(0, offsets, batches)
    engine.close()
    return torch.equal(before, after), found


def test_a_gradient_that_is_computed_again_has_the_same_bits_and_leaves_random_numbers_as_they_were():
    ((unchanged, (again, first, second)),) = on_ranks(1, replayed)
    assert unchanged
    assert torch.equal(again, first)
    assert not torch.equal(first, second)
    assert again.any()


class Calls:
    """A timer that keeps the names of the calls."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self) -> None:
        self.names.append("begin")

    def end(self) -> None:
        self.names.append("end")


def timed_and_state(stage: int, precision: str) -> tuple[list[str], int, int, int]:
    """The calls of a timer in a step, and the bytes of the optimizer's state: as said, found, and by own elements."""
    engine, layout, calls = engine_of(run_config(stage, precision=precision)), own_layout(), Calls()
    engine.time_steps(calls)
    engine.step(0, row_offsets(layout, 0), micro_batches(layout, 0))
    states: list[dict[str, Any]] = [*engine.optimizer.state.values()]
    moments = [value for state in states for name, value in state.items() if name.startswith("exp_avg")]
    found = engine.state_bytes, sum(value.nbytes for value in moments), 8 * engine.own_elements
    engine.close()
    return calls.names, *found


def test_parts_without_waiting_are_timed_and_the_bytes_of_states_are_known_at_every_stage():
    """DeepSpeed reduces the gradients at stage 2 in bf16, and gathers weights at stage 3. AdamW has two moments."""
    for of_rank in on_ranks(2, each_on_ranks, timed_and_state, [(1, "fp32"), (2, "bf16"), (3, "fp32")]):
        for calls, said, found, expected in of_rank:
            assert said == expected
            assert 0 <= found - said < 1024  # padding
            assert calls == ["begin", "end"] * (len(calls) // 2)
        assert len(of_rank[0][0]) == len(of_rank[1][0]) == 4  # two micro-batches
        assert len(of_rank[2][0]) > 4
