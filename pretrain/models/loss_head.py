"""The output matrix and the loss of its logits, without ever holding the logits of all states."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.kernels.products import linear
from pretrain.models.config.base import ModelConfig
from pretrain.models.layers import Linear, soft_capped
from pretrain.models.logit_bias import by_kernel
from pretrain.models.loss import Losses, configured_losses, hits_are_noted, places_of_targets

if TYPE_CHECKING:
    from pretrain.models.distilled_loss import TeacherTargets

_MOST_TARGETS = 7 / 8  # a larger share of the positions isn't picked out on a CPU: the copies would take the gain
_LOGITS = 1 << 27  # as many at a time: enough rows for products at full speed, 256 MB in bf16


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

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        labels: Tensor | None = None,
        config: ModelConfig | None = None,
        target_places: Tensor | None = None,
        teacher_targets: "TeacherTargets | None" = None,
    ) -> Tensor | Losses:
        """Maps (…, d_model) to logits (…, vocabulary); or with `labels` (…) to what `configured_losses` makes of them.

        Positions without a target are left out, on a CPU if they are worth it. On a GPU the others go through the
        matrix in chunks, whose logits the backward pass computes again: a third more arithmetic in this product, for no
        memory. `target_places` are the numbers of the labels that count, among all labels; without them the GPU is
        waited for. With `teacher_targets`, the result is that of `TeacherTargets.losses`.
        """
        x = self.scaled(x)
        if labels is None:
            return self._logits(x)
        assert config is not None
        settings = (config.z_loss, config.label_smoothing) if self.training else (0.0, 0.0)
        if teacher_targets is not None:
            return teacher_targets.losses(
                x, self.weight, self.offsets(x), labels, *settings, target_places, self.softcap
            )
        if not x.is_cuda or hits_are_noted():
            places = _worth_picking_out(labels)
            if places is None:
                return configured_losses(self._logits(x), labels, config, self.training)
            logits = self._logits(x.flatten(0, -2).index_select(0, places))
            losses = configured_losses(logits, labels.flatten()[places], config, self.training)
            return losses.new_zeros(labels.numel()).index_copy(0, places, losses).view(labels.shape)
        return chunked_losses(x, self.weight, self.offsets(x), labels, *settings, target_places, self.softcap)

    def _logits(self, x: Tensor) -> Tensor:
        return capped(linear(x, self.weight, self.offsets(x)), self.softcap)

    def scaled(self, x: Tensor) -> Tensor:
        """States (…, d_model) times the multiplier of the logits."""
        return x if self.multiplier == 1.0 else x * self.multiplier

    def offsets(self, x: Tensor) -> Tensor | None:
        """(vocabulary,) What is added to the logits of states like `x`."""
        return self.bias


def _worth_picking_out(labels: Tensor) -> Tensor | None:
    """The places of the labels that count, if these are few enough; a compiled graph has the same shapes for any."""
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    places = places_of_targets(labels)
    return places if len(places) <= _MOST_TARGETS * labels.numel() else None


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits within ± `softcap`; None: as they are."""
    return logits if softcap is None else soft_capped(logits, softcap)


def chunked_losses(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    places: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`token_losses` of the logits x · weightᵀ + bias, as a GPU computes them; `places` and `softcap` as in `Head`."""
    targets = labels.flatten()
    if places is None:
        places = places_of_targets(labels)
    states = x.flatten(0, -2).index_select(0, places)
    losses = _HeadLosses.apply(states, weight, bias, targets.index_select(0, places), z_loss, smoothing, softcap)
    return losses.new_zeros(targets.shape).index_copy(0, places, losses).view(labels.shape)


class _HeadLosses(torch.autograd.Function):
    """Losses of states (n, d_model), each of which has a target."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        z_loss: float,
        smoothing: float,
        softcap: float | None,
    ) -> Tensor:
        ctx.by_kernel = by_kernel(x)
        losses = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
        normalisers = torch.empty_like(losses)
        for part in parts(len(x), len(weight)):
            logits = capped(F.linear(x[part], weight, bias), softcap)
            losses[part], normalisers[part] = losses_of(logits, targets[part], z_loss, smoothing, ctx.by_kernel)
        ctx.save_for_backward(x, weight, bias, targets, normalisers)
        ctx.z_loss, ctx.smoothing, ctx.softcap = z_loss, smoothing, softcap
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        """dL/dlogit = (1 + 2 z log Z) p − (1 − s) [target] − s / vocabulary, times the loss's own gradient; with a soft
        cap also times its slope, 1 − (capped / cap)²."""
        x, weight, bias, targets, normalisers = ctx.saved_tensors
        of_shares = gradient * (1 + 2 * ctx.z_loss * normalisers)
        of_x = torch.empty_like(x)
        # in fp32: a bf16 sum would lose the share of a chunk
        of_weight = torch.zeros_like(weight, dtype=normalisers.dtype)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=normalisers.dtype)
        for part in parts(len(x), len(weight)):
            logits = capped(F.linear(x[part], weight, bias), ctx.softcap)
            slope = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square_()
            of_these = logits, targets[part], normalisers[part], of_shares[part], gradient[part]
            become_gradients(*of_these, ctx.smoothing, ctx.by_kernel)
            if slope is not None:
                logits *= slope
            of_x[part] = logits @ weight
            of_weight += logits.t() @ x[part]
            if of_bias is not None:
                of_bias += logits.sum(dim=0, dtype=of_bias.dtype)
        of_offsets = None if of_bias is None else of_bias.to(bias.dtype)
        return of_x, of_weight.to(weight.dtype), of_offsets, None, None, None, None


def parts(rows: int, vocabulary: int, logits: int | None = None) -> Iterator[slice]:
    """Slices of so many rows that their `logits` are held at a time, by default as many as suit a GPU."""
    step = max(1, (logits or _LOGITS) // vocabulary)
    return (slice(first, first + step) for first in range(0, rows, step))


def losses_of(logits: Tensor, targets: Tensor, z_loss: float, smoothing: float, kernel: bool) -> tuple[Tensor, Tensor]:
    """The losses (n,) of logits (n, vocabulary), and log Z (n,), at least in fp32."""
    if kernel:
        from pretrain.kernels import cross_entropy

        return cross_entropy.losses(logits, targets, z_loss, smoothing)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_z = logits.logsumexp(dim=-1)
    expected = logits.gather(-1, targets[:, None]).squeeze(-1)
    if smoothing:
        expected = (1 - smoothing) * expected + smoothing * logits.mean(dim=-1)
    return z_loss * log_z.square() + log_z - expected, log_z


def become_gradients(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    of_shares: Tensor,
    of_targets: Tensor,
    smoothing: float,
    kernel: bool,
) -> None:
    """Overwrites logits (n, vocabulary) by their gradients; the other tensors are (n,)."""
    if kernel:
        from pretrain.kernels import cross_entropy

        cross_entropy.become_gradients(logits, targets, log_z, of_shares, of_targets, smoothing)
        return
    shares = (logits.to(log_z.dtype) - log_z[:, None]).exp_().mul_(of_shares[:, None])
    if smoothing:
        shares -= (smoothing / logits.size(-1) * of_targets)[:, None]
    shares.scatter_add_(-1, targets[:, None], ((smoothing - 1) * of_targets)[:, None])
    logits.copy_(shares)
