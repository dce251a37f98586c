"""A small model whose gradients are exact in bf16 and fp32, in whatever order they are summed.

The loss is linear in every parameter, so a gradient depends on the batch alone. It is a sum of a few products of small
integers, times a power of two. SGD with powers of two as its settings keeps the fp32 weights exact too. Two correct
implementations therefore agree to the bit.
"""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch
from pretrain.models.model import Losses, Model

ROWS, STEPS = 2, 3  # rows of a micro-batch; more steps would need more bits than fp32 has
RATE = 1 / 4
_LENGTH, _WIDTH, _IDS = 4, 6, 5
_ASKS = 0  # a row that begins with this id uses the layer `sometimes`


class ExactModel(Model):
    """Its layer runs twice, its embedding is also its output matrix, and not every micro-batch uses `sometimes`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_IDS, _WIDTH)
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH)])
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
    """(rows, columns) -2, -1, 1 and 2, in no simple order."""
    return torch.tensor([-2.0, 1.0, 2.0, -1.0, 1.0])[torch.arange(rows * columns) ** 2 % 7 % 5].view(rows, columns)


def sgd(model: nn.Module) -> SGD:
    """SGD with two groups, as for matrices and vectors, and momentum, so that a state must be kept between steps."""
    vectors = [one for name, one in model.named_parameters() if name == "gain" or name.endswith("bias")]
    matrices = [one for name, one in model.named_parameters() if name.endswith("weight")]  # ZeRO-3 shows no shapes
    schedule = {"lr": RATE, "base_rate": RATE, "frozen_until": 0}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 1 / 4, **schedule},
        {"params": vectors, "weight_decay": 0.0, **schedule},
    ]
    return SGD(groups, momentum=1 / 2)


def micro_batches(step: int, accumulation: int, ranks: int) -> list[list[Batch]]:
    """The micro-batches of step `step`, of each rank. Together they have a power of two of valid labels, which are
    spread unevenly. In even steps the last and every other one before it use the layer `sometimes`.

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
    """The results of a step of a plain loop, fp32: the gradient and the weights after it by name, the gradient's
    norm."""

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
