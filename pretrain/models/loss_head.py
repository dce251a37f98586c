"""The output matrix and the loss of its logits, on GPUs without ever holding the logits of all states."""

import torch
from torch import Tensor

from pretrain.config.models import ModelConfig
from pretrain.kernels.matmul import linear
from pretrain.models.chunked_cross_entropy import CrossEntropy, capped, chunked_cross_entropy
from pretrain.models.layers import Linear
from pretrain.models.loss import configured_losses, hits_are_recorded, indices_of_targets

_MOST_TARGETS = (
    7 / 8
)  # on a CPU, a larger share of the positions isn't selected: the copies would cost more than it saves


class Head(Linear):
    """The output matrix. With labels it returns their losses, all inside its own forward, where ZeRO-3 gathers it.

    `softcap`: logits stay within ± this; None: no limit. `multiplier`: what logits are multiplied by before biases are
    added and they are capped, which muP sets.
    """

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
    ) -> Tensor:
        """Maps (…, d_model) to logits (…, vocabulary) or, given `labels` (…), to their losses (…).

        Positions without a target are skipped; on a CPU, only where that saves time. `target_indices` are the indices
        of the labels that count, among all labels; without them the host waits for the GPU to find them.
        """
        x = self.scaled(x)
        if labels is None:
            return self._logits(x)
        assert config is not None
        if x.is_cuda and not hits_are_recorded():
            z_loss, label_smoothing = (config.z_loss, config.label_smoothing) if self.training else (0.0, 0.0)
            settings = CrossEntropy(z_loss, label_smoothing, self.softcap)
            return chunked_cross_entropy(x, self.weight, self.offsets(x), labels, settings, target_indices)
        indices = _indices_worth_selecting(labels)
        if indices is None:
            return configured_losses(self._logits(x), labels, config, self.training)
        logits = self._logits(x.flatten(0, -2).index_select(0, indices))
        losses = configured_losses(logits, labels.flatten()[indices], config, self.training)
        return losses.new_zeros(labels.numel()).index_copy(0, indices, losses).view(labels.shape)

    def _logits(self, x: Tensor) -> Tensor:
        return capped(linear(x, self.weight, self.offsets(x)), self.softcap)

    def scaled(self, x: Tensor) -> Tensor:
        """States (…, d_model) times the multiplier of the logits."""
        return x if self.multiplier == 1.0 else x * self.multiplier

    def offsets(self, x: Tensor) -> Tensor | None:
        """(vocabulary,) What is added to the logits of states like `x`."""
        return self.bias


def _indices_worth_selecting(labels: Tensor) -> Tensor | None:
    """The indices of the labels that count, if these are few enough; a compiled graph has the same shapes for any."""
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    indices = indices_of_targets(labels)
    return indices if len(indices) <= _MOST_TARGETS * labels.numel() else None
