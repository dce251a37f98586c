"""Ranks that use different parameters in a step, and parameters that take no gradient."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.base.errors import UserError
from pretrain.engine.construction import sharded
from pretrain.models.model import Losses, Model
from tests.support.rank_processes import on_ranks
from tests.support.small_runs import micro_batches, own_layout, own_sharding, row_offsets, run_config

RATE, STEPS, WIDTH = 0.1, 2, 16
OTHERS_ADD = [(1, "fp32"), (1, "bf16"), (2, "fp32")]
MIXED_UP = [(2, "bf16"), (3, "bf16"), (3, "fp32")]
NAMES = {2: "layers.0.weight, layers.1.weight", 3: "layers.0, layers.1"}  # what the ranks have met at


class First(nn.Linear):
    """A linear map whose weights bf16 holds exactly, also where a stage draws other random numbers."""

    start = 0

    def reset_parameters(self) -> None:
        numbers = torch.arange(self.start, self.start + self.weight.numel()) * 37 % 101 - 50
        self.weight.data.copy_(numbers.view(self.weight.shape) / 256)


class Second(First):
    start = 7


class Stochastic(Model):
    """Uses one of two layers: `choices[step][rank]`, or for a whole step the one that follows from its number.

    Choices of layers with equal sizes are the worst case: no collective can fail.
    """

    def __init__(self, rank: int, choices: list[list[int]] | None) -> None:
        super().__init__()
        self.embedding = First(100, WIDTH, bias=False)
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, bias=False) for kind in (First, Second))
        self.head = First(WIDTH, 100, bias=False)
        self._rank, self._choices, self._chosen = rank, choices, 0

    def begin_step(self, seed: int, step: int) -> None:
        self._chosen = self._choices[step][self._rank] if self._choices else (seed + step) % 2

    def forward(
        self, encoder_input_ids: Tensor, labels: Tensor, encoder_attention_mask: Tensor | None = None
    ) -> Losses:
        """(batch, length) ids and labels → the loss at each label, fp32."""
        ids = F.one_hot(encoder_input_ids[:, : labels.size(1)], 100)
        x = self.embedding(ids.to(self.embedding.weight.dtype))
        logits = self.head(x + self.layers[self._chosen](x)).float()
        return {"labels": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": list(model.parameters()), "lr": RATE, "base_rate": RATE, "frozen_until": 0}])


def trained(stage: int, precision: str, choices: list[list[int]] | None) -> dict[str, Tensor] | str:
    """How two steps have changed the fp32 weights, or the error of the run."""
    from pretrain.engine.engine import Engine

    optimizer = {"learning_rate": RATE, "gradient_clipping": 0.0}
    config, layout = run_config(stage, precision=precision, optimizer=optimizer), own_layout()
    sharding = own_sharding(config)
    with sharded(config, sharding):
        model = Stochastic(layout.rank, choices)
    engine = Engine.initialize(model, config, sharding, optimizer=sgd(model))
    before = weights_of(engine)
    try:
        for step in range(STEPS):
            engine.step(step, row_offsets(layout, step), micro_batches(layout, step))
    except UserError as error:
        return str(error)
    return {name: values - before[name] for name, values in weights_of(engine).items()}


def weights_of(engine: Any) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(one).clone() for name, one in engine.module.named_parameters()}


def plain(choices: list[list[int]]) -> dict[str, Tensor]:
    """How a loop in fp32 over the micro-batches of both ranks changes the weights."""
    model = Stochastic(0, choices)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(STEPS):
        losses, labels = torch.zeros(()), 0
        for rank in range(2):
            model._chosen = choices[step][rank]
            for batch in micro_batches(own_layout_of(rank), step):
                losses = losses + model(**batch)["labels"].sum()
                labels += int((batch["labels"] != -100).sum())
        gradients = torch.autograd.grad(losses / labels, [*model.parameters()], materialize_grads=True)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= RATE * gradient
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def own_layout_of(rank: int) -> Any:
    from data_pipeline.loading.batch_layout import BatchLayout

    return BatchLayout(rank, 2, 2, 2)


def off(changes: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The distance of the changes from those that are expected, relative to these."""
    squares = [float(((changes[name] - values) ** 2).sum()) for name, values in expected.items()]
    return math.sqrt(sum(squares) / sum(float((values**2).sum()) for values in expected.values()))


BOUNDS = {"fp32": 1e-5, "bf16": 0.02}  # bf16 has 8 bits
APART, LATER = [[0, 1], [1, 0]], [[0, 0], [0, 1]]


def each_way() -> list[Any]:
    """Without a process of its own for each engine: starting ranks is slow."""
    apart = [trained(*setting, APART) for setting in [*OTHERS_ADD, *MIXED_UP]]
    return [apart, trained(2, "bf16", LATER), [trained(*setting, None) for setting in [*OTHERS_ADD, *MIXED_UP]]]


@pytest.fixture(scope="module")
def found() -> list[list[Any]]:
    return on_ranks(2, each_way)


def test_stages_with_whole_gradients_add_up_what_each_rank_has_used(found):
    expected = plain(APART)
    for of_rank in found:
        for (_, precision), changes in zip(OTHERS_ADD, of_rank[0], strict=False):
            assert off(changes, expected) < BOUNDS[precision]


def test_other_stages_refuse_ranks_that_use_different_parameters_in_their_first_step(found):
    """On both ranks, before they meet in a collective: bf16 weights were off by 8 % of their change, or a rank hung."""
    for of_rank in found:
        for (stage, precision), error in zip(MIXED_UP, of_rank[0][len(OTHERS_ADD) :], strict=True):
            assert error == (
                f"model: the ranks use different parameters in a step ({NAMES[stage]}), which "
                f"deepspeed.zero_optimization.stage: {stage} in {precision} can't add up; set stage 1, or 2 with "
                "precision: fp32, or have the family choose alike on all ranks, by what Model.begin_step gets"
            )


def test_ranks_that_use_different_parameters_in_a_later_step_are_refused_after_it(found):
    for of_rank in found:
        assert of_rank[1].startswith("model: the ranks use different parameters in a step (layers.0.weight, layers.1.w")


def test_ranks_that_choose_alike_train_at_every_stage(found):
    """By the step's number: layer 0, then layer 1."""
    expected = plain([[0, 0], [1, 1]])
    for of_rank in found:
        for (_, precision), changes in zip([*OTHERS_ADD, *MIXED_UP], of_rank[2], strict=True):
            assert off(changes, expected) < BOUNDS[precision]


def test_a_parameter_that_takes_no_gradient_is_refused(one_rank):
    from pretrain.engine.engine import Engine

    model = Stochastic(0, None)
    model.layers[1].requires_grad_(False)
    with pytest.raises(UserError) as error:
        Engine.initialize(model, run_config(), own_sharding(run_config()), optimizer=sgd(model))
    assert str(error.value) == (
        "model: Stochastic has parameters with requires_grad=False (layers.1.weight), which no checkpoint would have; "
        "make them buffers (register_buffer), or freeze them by optimizer.freeze instead"
    )
    assert dist.get_world_size() == 1
