"""The loss of a student that learns from a teacher's distribution besides the text: Hinton et al., "Distilling the
Knowledge in a Neural Network" (2015).

With z the student's logits at a target, u the teacher's at the same token of the same text, T the temperature and w the
weight:

    loss = (1 − w) · cross-entropy(z) + w · T² · KL(p ‖ q),   p = softmax(u / T),   q = softmax(z / T)

T² keeps the size of the second part's gradient, which falls as 1 / T² (section 2 there). p is over the teacher's whole
vocabulary. With `top_k`, only so many of its likeliest ids keep their probabilities, divided by their sum; the others'
become 0. So are those of ids that only the student has. q is always over the student's whole vocabulary. Gemma 3 (2025,
section 2.2) takes some ids of its teacher in the same way, but draws them.

The cross-entropy has the student's label smoothing. Its z-loss isn't weighted.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.kernels.products import linear, product
from pretrain.models.loss import CROSS_ENTROPY, DISTILLATION_LOSS, Losses, places_of_targets
from pretrain.models.loss_head import Head, become_gradients, capped, losses_of, parts

_LOGITS = 1 << 26  # as many at a time; a few tensors of their size in fp32 exist at once


class Target(NamedTuple):
    """The teacher's distribution at n targets: log p (n, k), and its ids (n, k); None: ids 0 to k − 1."""

    log_p: Tensor
    ids: Tensor | None


@dataclass(frozen=True)
class TeacherTargets:
    """What a teacher knows of the n labels of a micro-batch that count.

    `states` (n, d_teacher) become its logits by its `head`, of which the first `vocabulary` are of ids. `shares` (n,)
    fp32: the weight w of each label, 0 where the teacher has nothing to say.
    """

    head: Head
    states: Tensor
    vocabulary: int
    shares: Tensor
    temperature: float = 1.0
    top_k: int | None = None

    def target(self, part: slice) -> Target:
        """The distribution at some of the labels, computed from the states whenever it is needed."""
        with torch.no_grad():
            logits = self.head(self.states[part])[:, : self.vocabulary]
        logits = logits.to(self.shares.dtype) / self.temperature
        if self.top_k is None or self.top_k >= self.vocabulary:
            return Target(torch.log_softmax(logits, dim=-1), None)
        likeliest, ids = logits.topk(self.top_k, dim=-1)
        return Target(torch.log_softmax(likeliest, dim=-1), ids)

    def losses(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        z_loss: float = 0.0,
        smoothing: float = 0.0,
        places: Tensor | None = None,
        softcap: float | None = None,
    ) -> Losses:
        """The losses of states x (…, d_model) of the student, whose logits are x · weightᵀ + bias, capped.

        Each has the shape of the labels, is fp32, and 0 where the label is -100. "labels" is the loss above, and alone
        has a gradient. "cross_entropy" is what the loss would be without a teacher. "distillation_loss" is T² · KL, and
        0 where the teacher has nothing to say. No logits are held but those of a few targets at a time; the backward
        pass computes them again, the teacher's as well.
        """
        flat = labels.flatten()
        places = places_of_targets(labels) if places is None else places
        states, targets = x.flatten(0, -2).index_select(0, places), flat.index_select(0, places)
        found = _DistilledLosses.apply(states, weight, bias, targets, z_loss, smoothing, softcap, self)
        names = ("labels", CROSS_ENTROPY, DISTILLATION_LOSS)
        return {
            name: one.new_zeros(flat.shape).index_copy(0, places, one).view(labels.shape)
            for name, one in zip(names, found, strict=True)
        }


class _DistilledLosses(torch.autograd.Function):
    """The three losses (n,) of states (n, d_model), each of which has a target."""

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
        teacher_targets: TeacherTargets,
    ) -> tuple[Tensor, Tensor, Tensor]:
        temperature, shares = teacher_targets.temperature, teacher_targets.shares
        own, divergence, log_z, log_z_at_t = x.new_empty(4, len(x), dtype=shares.dtype)
        for part in parts(len(x), len(weight), _LOGITS):
            logits = capped(linear(x[part], weight, bias), softcap).to(shares.dtype)
            own[part], log_z[part] = losses_of(logits, targets[part], 0.0, smoothing, kernel=False)
            logits /= temperature
            log_z_at_t[part] = logits.logsumexp(dim=-1)
            log_p, ids = teacher_targets.target(part)
            log_q = (logits[:, : teacher_targets.vocabulary] if ids is None else logits.gather(-1, ids)) - log_z_at_t[
                part, None
            ]
            divergence[part] = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
        divergence *= temperature**2
        divergence.masked_fill_(shares == 0, 0.0)
        regular = z_loss * log_z.square()
        loss = (1 - shares) * own + shares * divergence + regular
        own += regular
        ctx.save_for_backward(x, weight, bias, targets, log_z, log_z_at_t)
        ctx.z_loss, ctx.smoothing, ctx.softcap, ctx.teacher_targets = z_loss, smoothing, softcap, teacher_targets
        ctx.mark_non_differentiable(own, divergence)
        return loss, own, divergence

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple:
        """dL/dlogit = (1 − w) (softmax(z) − target) + 2 z-loss log Z softmax(z) + w T (q − p), times the loss's own
        gradient; with a soft cap also times its slope, 1 − (capped / cap)²."""
        x, weight, bias, targets, log_z, log_z_at_t = ctx.saved_tensors
        teacher_targets: TeacherTargets = ctx.teacher_targets
        of_targets = gradient * (1 - teacher_targets.shares)
        of_shares = of_targets + gradient * 2 * ctx.z_loss * log_z
        of_teacher = gradient * teacher_targets.shares * teacher_targets.temperature
        of_x = torch.empty_like(x)
        # in fp32: a bf16 sum would lose the share of a chunk
        of_weight = torch.zeros_like(weight, dtype=log_z.dtype)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=log_z.dtype)
        for part in parts(len(x), len(weight), _LOGITS):
            logits = capped(linear(x[part], weight, bias), ctx.softcap).to(log_z.dtype)
            found = (logits / teacher_targets.temperature - log_z_at_t[part, None]).exp_().mul_(of_teacher[part, None])
            log_p, ids = teacher_targets.target(part)
            of_p = log_p.exp_().mul_(-of_teacher[part, None])
            if ids is None:
                found[:, : teacher_targets.vocabulary] += of_p
            else:
                found.scatter_add_(-1, ids, of_p)
            slope = 1.0 if ctx.softcap is None else 1 - (logits / ctx.softcap).square_()
            of_these = logits, targets[part], log_z[part], of_shares[part], of_targets[part]
            become_gradients(*of_these, ctx.smoothing, kernel=False)
            of_logits = ((found + logits) * slope).to(x.dtype)
            of_x[part] = product(of_logits, weight)
            of_weight += product(of_logits.t(), x[part])
            if of_bias is not None:
                of_bias += of_logits.sum(dim=0, dtype=of_bias.dtype)
        of_offsets = None if of_bias is None else of_bias.to(bias.dtype)
        return of_x, of_weight.to(weight.dtype), of_offsets, None, None, None, None, None
