"""Checks that DeepSpeed trains like a plain loop, with a run's settings and on the ranks of this process group.

Both train a small model. Its gradients are exact in bf16 and fp32, in whatever order they are summed, so after each
step the weights must be equal to the bit. The loss is linear in every parameter, so a gradient depends on the batch
alone: it is a sum of a few products of small integers, times a power of two. SGD with powers of two as its settings
keeps the fp32 weights exact, too.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.optim import SGD

from data_pipeline.base.formatting import counted
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch
from pretrain.config import RunConfig
from pretrain.config.batch import BatchSection
from pretrain.config.deepspeed_keys import DeepSpeedSection
from pretrain.config.schedules import ConstantSchedule
from pretrain.engine.construction import prepare_layers, sharded
from pretrain.engine.engine import Engine
from pretrain.engine.ranks import first_value
from pretrain.engine.sharding import Sharding
from pretrain.models.layers import Layer
from pretrain.models.model import Losses, Model
from tests.support.reductions import reducing

ROWS = 2  # of a micro-batch
STEPS = 3  # more steps would need more bits than fp32 has
RATE = 1 / 4
_LENGTH, _WIDTH, _IDS = 4, 6, 5
_ASKS = 0  # a row that begins with this id uses the layer `sometimes`


class LinearLayer(Layer, nn.Linear):
    """A linear map as a layer."""

    run = nn.Linear.forward


class ExactModel(Model):
    """A model whose layer runs twice, whose embedding is tied to the output, and whose layer `sometimes` isn't used by
    every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_IDS, _WIDTH)
        self.layers = nn.ModuleList([LinearLayer(_WIDTH, _WIDTH)])
        self.sometimes = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(_WIDTH))
        self.head = nn.Linear(_WIDTH, _IDS, bias=False)
        self.head.weight = self.embedding.weight
        self.inputs: Tensor
        self.weighting: Tensor
        self.register_buffer("inputs", _integers(_IDS, _WIDTH), persistent=False)
        self.register_buffer("weighting", _integers(_WIDTH, _IDS).T.contiguous(), persistent=False)

    def fill(self) -> None:
        """Sets all parameters, which must be whole, to multiples of 1/4."""
        for number, parameter in enumerate(self.parameters()):
            values = (torch.arange(parameter.numel()) * 5 + 3 * number) % 9 - 4
            parameter.data.copy_(values.view(parameter.shape) / 4)

    def forward(self, encoder_input_ids: Tensor, labels: Tensor) -> Losses:
        """(batch, length) ids and labels → the loss at each label, fp32; 0 where it is ignored."""
        dtype = self.gain.dtype
        x = self.inputs[encoder_input_ids].to(dtype)
        valid = labels != IGNORE_INDEX
        weighting = self.weighting[labels.clamp_min(0)].to(dtype)
        (layer,) = self.layers
        first = layer(x)
        second = layer(x.roll(1, dims=-1) + 0 * first)  # after the first, as recurrent layers run
        looked_up = self.embedding(encoder_input_ids)
        y = first + second + looked_up + x * self.gain
        asks = encoder_input_ids[:, :1, None] == _ASKS
        if bool(asks.any()):
            y = y + self.sometimes(x) * asks
        scores = self.head(x + 0 * looked_up).sum(dim=-1)
        return {"labels": ((y * weighting).sum(dim=-1) + scores).float() * valid}


def _integers(rows: int, columns: int) -> Tensor:
    """(rows, columns) of -2, -1, 1 and 2, in no simple order."""
    return torch.tensor([-2.0, 1.0, 2.0, -1.0, 1.0])[torch.arange(rows * columns) ** 2 % 7 % 5].view(rows, columns)


def sgd(model: nn.Module) -> SGD:
    """SGD with two groups, for matrices and vectors, and with momentum, a state that must be kept between steps."""
    vectors = [one for name, one in model.named_parameters() if name == "gain" or name.endswith("bias")]
    matrices = [one for name, one in model.named_parameters() if name.endswith("weight")]  # ZeRO-3 shows no shapes
    schedule = {"lr": RATE, "base_rate": RATE, "frozen_until": 0}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 1 / 4, **schedule},
        {"params": vectors, "weight_decay": 0.0, **schedule},
    ]
    return SGD(groups, momentum=1 / 2)


def micro_batches(step: int, accumulation: int, ranks: int) -> list[list[Batch]]:
    """The micro-batches of step `step`, for each rank. Their number of valid labels is a power of two, spread unevenly.
    In even steps, the last micro-batch and every other one before it use the layer `sometimes`.

    With an offloaded optimizer, DeepSpeed loses the gradient of a parameter that the last micro-batch doesn't use. All
    families use every parameter in every micro-batch.
    """
    generator = torch.Generator().manual_seed(step)
    shape = (ranks, accumulation, ROWS, _LENGTH)
    ids = torch.randint(_ASKS + 1, _IDS, shape, generator=generator)
    labels = torch.randint(0, _IDS, shape, generator=generator)
    if step % 2 == 0:
        ids[:, (accumulation - 1) % 2 :: 2, 0, 0] = _ASKS
    valid = 2 ** ((3 * labels.numel() // 4).bit_length() - 1)
    labels.view(-1)[torch.randperm(labels.numel(), generator=generator)[valid:]] = IGNORE_INDEX
    return [
        [{"encoder_input_ids": ids[rank, one], "labels": labels[rank, one]} for one in range(accumulation)]
        for rank in range(ranks)
    ]


class PlainStep(NamedTuple):
    """The results of a step of a plain loop, fp32: the gradients and the new weights by name, and the gradient norm."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    norm: float


def plain_loop(accumulation: int, ranks: int) -> list[PlainStep]:
    """Trains the model on the global batches in this process, in fp32 and without DeepSpeed."""
    model = ExactModel()
    model.fill()
    optimizer = sgd(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    steps = []
    for step in range(STEPS):
        batches = [batch for own in micro_batches(step, accumulation, ranks) for batch in own]
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        optimizer.zero_grad(set_to_none=False)
        (model(**whole)["labels"].sum() / (whole["labels"] != IGNORE_INDEX).sum()).backward()
        gradients = {name: cast(Tensor, one.grad).clone() for name, one in model.named_parameters()}
        optimizer.step()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        steps.append(PlainStep(gradients, weights, norm))
    return steps


_NEVER_CLIPS = 2.0**20
# numbers of elements that a run's model exceeds, and this model, too: a bucket holds some parameters, not the largest
_BUCKET = 32
_SIZES = {
    "allgather_bucket_size": 32,
    "stage3_prefetch_bucket_size": 32,
    "stage3_param_persistence_threshold": 20,
    "sub_group_size": 50,
}
_ROUNDING = 2.0**-20  # of the gradient norm alone: it is a square root, and DeepSpeed adds norms of parts
_SHOWN = 3  # parameters


def differences(config: RunConfig, accumulation: int) -> str:
    """Trains the small model with DeepSpeed and the settings of `config`, and without DeepSpeed. Returns what differs;
    empty if nothing does. All ranks call this together, and get the same result.

    A step has `accumulation` micro-batches on each rank.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with torch.random.fork_rng(devices=[]), _engine(_small(config, accumulation, ranks)) as engine:
        for step, expected in enumerate(plain_loop(accumulation, ranks)):
            engine.step(step, range(accumulation), micro_batches(step, accumulation, ranks)[rank])
            # what one rank alone finds ends the comparison on all of them
            if found := first_value(_wrong(engine, expected) or None):
                return f"wrong from step {step + 1} on: {found}"
    return ""


def _wrong(engine: Engine, expected: PlainStep) -> str:
    """The differences from the expected state after a step; empty if there are none."""
    differences = list(_differences(engine.deepspeed, expected))
    shown = differences[:_SHOWN]
    if len(differences) > _SHOWN:
        shown.append(counted(len(differences) - _SHOWN, "more parameter"))
    if abs(engine.gradient_norm - expected.norm) > _ROUNDING * expected.norm:
        shown.append(f"the gradient's norm {engine.gradient_norm:.6g} instead of {expected.norm:.6g}")
    return ", ".join(shown)


def _small(config: RunConfig, accumulation: int, ranks: int) -> RunConfig:
    """`config` for the small model: only ZeRO's sections, the precision and activation checkpointing matter."""
    zero = config.deepspeed.zero_optimization
    given = zero.model_dump()
    sizes = {name: min(getattr(zero, name), size) for name, size in _SIZES.items()}
    on_cpu = {key: {"device": "cpu"} for key in zero.offloaded_to("nvme")}  # so small a model isn't swapped
    small = {**given, **sizes, **on_cpu, "zero_quantized_weights": False}  # what is gathered quantized isn't exact
    deepspeed_section = {"zero_optimization": small, "aio": config.deepspeed.aio}
    rows = ranks * accumulation * ROWS
    return config.model_copy(
        update={
            "batch": BatchSection(global_batch_size=rows, micro_batch_size=ROWS),
            "optimizer": config.optimizer.model_copy(update={"gradient_clipping": _NEVER_CLIPS, "ema_decay": None}),
            "schedule": ConstantSchedule(),
            "deepspeed": DeepSpeedSection.model_validate(deepspeed_section),
            "compute": config.compute.model_copy(update={"compile": False, "cuda_graphs": False}),
        }
    )


@contextlib.contextmanager
def _engine(config: RunConfig) -> Iterator[Engine]:
    sharding = Sharding.of(config, dist.get_world_size())
    with reducing(reduce_bucket_size=_BUCKET), sharded(config, sharding):
        model = ExactModel()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.fill()
    prepare_layers(model, config.compute, sharding.deepspeed_stage)
    with reducing(reduce_bucket_size=_BUCKET):
        engine = Engine.initialize(model, config, sharding, optimizer=sgd(model))
    yield engine
    engine.close()


def _differences(engine: DeepSpeedEngine, expected: PlainStep) -> Iterator[str]:
    """The parameters whose weights after a step aren't as expected: the fp32 weights, or those that the model uses.

    Each with the number of wrong elements and, if DeepSpeed shows fp32 weights, the gradient of the worst element.
    """
    for name, parameter in engine.module.named_parameters():
        right = expected.weights[name].to(engine.device)
        with deepspeed.zero.GatheredParameters([parameter]):
            computed_with = parameter.detach().clone()
        wrong = computed_with != right.to(computed_with.dtype)
        gradient = ""
        master_weights = deepspeed.utils.safe_get_full_fp32_param(parameter)
        if master_weights is not None:
            excess = master_weights.to(right) - right
            wrong |= excess != 0
            place = excess.view(-1).abs().argmax()
            right_one = float(expected.gradients[name].view(-1)[place])
            gradient = f", gradient {right_one - float(excess.view(-1)[place]) / RATE:g} instead of {right_one:g}"
        if elements := int(wrong.sum()):
            yield f"{name} ({counted(elements, 'element')}{gradient})"
