"""The base class of all families, the output matrix, and the loss of each target token."""

import contextlib
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.config.model_config import ModelConfig
from pretrain.models.functional import arithmetic
from pretrain.models.layers import Linear

_MOST_TARGETS = 7 / 8  # if more positions have a target, a CPU computes all: copies would cost more than they save

# Losses by name: "labels" (batch, targets), and others of the family. A step's loss is the sum of their means over the
# labels that aren't ignored. In training, a loss without a gradient is only reported.
Losses = dict[str, Tensor]
# Replaces cross-entropy: the head's forward calls loss(head, states, labels, config, target_indices).
HeadLoss = Callable[["Head", Tensor, Tensor, ModelConfig, Tensor | None], Tensor]


class Model(nn.Module):
    """The base class of all families. `forward` takes a batch's tensors by name and returns the loss of each label.

    `data_pipeline.loading.batches.as_batch` names the tensors.

    Attributes:
        decoder_reads_targets: True if a decoder reads the targets, False if all layers read the inputs.
    """

    config: ModelConfig
    decoder_reads_targets: ClassVar[bool] = False

    forward: Callable[..., Losses]

    def begin_step(self, seed: int, step: int) -> None:
        """Called before each training step. A family that draws random numbers for a whole step keys them by `seed`
        and `step`."""

    def before_head(self, x: Tensor) -> Tensor:
        """Maps the decoder's states `x` (…, d_model) to the input of the output matrix, of the same shape."""
        return x

    def num_parameters(self) -> int:
        """The number of trained scalars; a tied matrix counts once. For a model that ZeRO-3 shards, ask its
        `meta_model`."""
        return sum(parameter.numel() for parameter in self.parameters())


def shift_right(labels: Tensor, start_id: int, segments: Tensor | None = None, pad_id: int | None = None) -> Tensor:
    """Decoder inputs for labels (batch, length): [5, 6, 1, -100] → [0, 5, 6, 1].

    Ignored labels become `pad_id`; default: `start_id`, since padding often starts the decoder. Each example of a
    packed row starts anew: [5, 1, 6, 1] with segments [1, 1, 2, 2] → [0, 5, 0, 6].
    """
    pad_id = start_id if pad_id is None else pad_id
    start = labels.new_full((labels.size(0), 1), start_id)
    shifted = torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORE_INDEX, pad_id)], dim=1)
    if segments is not None:
        shifted[:, 1:].masked_fill_(segments[:, 1:] != segments[:, :-1], start_id)
    return shifted


class Head(Linear):
    """The output matrix. Given labels, its forward also computes their losses: there ZeRO-3 gathers the matrix.

    Attributes:
        softcap: logits stay within ± this. None: no limit.
        multiplier: factor of the logits, before biases and the soft cap (muP).
        compiled: True if torch.compile fuses the operations on logits, on GPUs.
        hits: the list of `recording_hits`. None: off.
    """

    compiled = False
    hits: list[Tensor] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        std: float,
        bias: bool = False,
        softcap: float | None = None,
        multiplier: float = 1.0,
    ):
        super().__init__(in_features, out_features, std, bias)
        self.softcap, self.multiplier = softcap, multiplier

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        config: ModelConfig | None = None,
        target_indices: Tensor | None = None,
        loss: HeadLoss | None = None,
    ) -> Tensor:
        """Maps (…, d_model) to logits (…, vocabulary) or, given `labels` (…), to their losses (…).

        Positions with ignored labels are skipped; on a CPU, only where that saves time. `target_indices`: the indices
        of the other labels, in the flattened labels; without them the host waits for the GPU. `loss`: computes the
        losses from states that are scaled already.
        """
        x = self.scaled(x)
        if labels is None:
            return self._logits(x)
        assert config is not None
        if loss is not None:
            return loss(self, x, labels, config, target_indices)
        z_loss, label_smoothing = (config.z_loss, config.label_smoothing) if self.training else (0.0, 0.0)
        if x.is_cuda and self.hits is None:
            settings = arithmetic.CrossEntropy(z_loss, label_smoothing, self.softcap, self.compiled)
            return arithmetic.chunked_cross_entropy(x, self.weight, self.offsets(x), labels, settings, target_indices)
        indices = _indices_worth_selecting(labels)
        selected = labels if indices is None else labels.flatten()[indices]
        states = x if indices is None else x.flatten(0, -2).index_select(0, indices)
        if self.hits is None:
            losses = arithmetic.token_losses(self._logits(states), selected, z_loss, label_smoothing)
        else:
            losses = self._recorded(states, selected, self.hits, z_loss, label_smoothing)
        if indices is None:
            return losses
        return losses.new_zeros(labels.numel()).index_copy(0, indices, losses).view(labels.shape)

    def _recorded(self, x: Tensor, labels: Tensor, hits: list[Tensor], z_loss: float, label_smoothing: float) -> Tensor:
        """The losses (…) of states (…, d_model); appends to `hits`. Only a chunk of the logits exists at a time."""
        step = arithmetic.rows_per_chunk(self.weight)
        losses, likeliest = [], []
        for states, targets in zip(x.flatten(0, -2).split(step), labels.flatten().split(step), strict=True):
            logits = self._logits(states)
            losses.append(arithmetic.token_losses(logits, targets, z_loss, label_smoothing))
            likeliest.append(logits.argmax(dim=-1) == targets)
        hits.append(torch.cat(likeliest).view(labels.shape))
        return torch.cat(losses).view(labels.shape)

    def _logits(self, x: Tensor) -> Tensor:
        return arithmetic.soft_capped(F.linear(x, self.weight, self.offsets(x)), self.softcap)

    def scaled(self, x: Tensor) -> Tensor:
        """States (…, d_model) times `multiplier`."""
        return x if self.multiplier == 1.0 else x * self.multiplier

    def offsets(self, x: Tensor) -> Tensor | None:
        """The biases (vocabulary,) of the logits in the dtype of `x`; None: no biases."""
        return self.bias


@contextlib.contextmanager
def recording_hits(model: nn.Module) -> Iterator[list[Tensor]]:
    """In the block, each forward pass of `model` with labels appends to the list which labels are the likeliest ids.

    An item is bool, in the labels' shape, or flat without the ignored labels. Models don't return hits, since training
    doesn't need this pass over the logits.
    """
    heads = [module for module in model.modules() if isinstance(module, Head)]
    found: list[Tensor] = []
    try:
        for head in heads:
            head.hits = found
        yield found
    finally:
        for head in heads:
            head.hits = None


def _indices_worth_selecting(labels: Tensor) -> Tensor | None:
    """The indices of the labels that aren't ignored. None: all positions, so that a compiled graph has fixed shapes."""
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    indices = arithmetic.indices_of_targets(labels)
    return indices if len(indices) <= _MOST_TARGETS * labels.numel() else None
