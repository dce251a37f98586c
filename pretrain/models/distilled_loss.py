"""The loss of a student that learns from a teacher's distribution besides the text: Hinton et al., "Distilling the
Knowledge in a Neural Network" (2015).

With z the student's logits at a target, u the teacher's at the same token of the same text, T the temperature and w the
weight:

    loss = (1 − w) · cross-entropy(z) + w · T² · KL(p ‖ q),   p = softmax(u / T),   q = softmax(z / T)

T² keeps the size of the second part's gradient, which falls as 1 / T² (section 2 there). p is over the teacher's whole
vocabulary. With `top_k`, its k likeliest ids keep their probabilities, divided by their sum, and all others have none.
Neither have ids that only the student has. q is always over the student's whole vocabulary. Gemma 3 (2025, section 2.2)
restricts its teacher to some ids in the same way, but draws them.

The cross-entropy has the student's label smoothing. Its z-loss isn't weighted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Target(NamedTuple):
    """The teacher's distribution at n targets: log p (n, k), and its ids (n, k); None: ids 0 to k − 1."""

    log_p: Tensor
    ids: Tensor | None


@dataclass(frozen=True)
class TeacherTargets:
    """What a teacher predicts for the n labels of a micro-batch that count.

    `head` maps `states` (n, d_teacher) to its logits, of which the first `vocabulary` are of ids. `weights` (n,) fp32:
    the weight w of each label, 0 where the teacher has nothing to say.
    """

    head: Callable[[Tensor], Tensor]
    states: Tensor
    vocabulary: int
    weights: Tensor
    temperature: float = 1.0
    top_k: int | None = None

    def target(self, chunk: slice) -> Target:
        """The distribution at some of the labels, computed from the states whenever it is needed."""
        with torch.no_grad():
            logits = self.head(self.states[chunk])[:, : self.vocabulary]
        logits = logits.to(self.weights.dtype) / self.temperature
        if self.top_k is None or self.top_k >= self.vocabulary:
            return Target(torch.log_softmax(logits, dim=-1), None)
        likeliest, ids = logits.topk(self.top_k, dim=-1)
        return Target(torch.log_softmax(likeliest, dim=-1), ids)

    def divergence(self, chunk: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        """T² · KL(p ‖ q) and log Z of q, both (m,), for the student's logits (m, vocabulary) at the labels `chunk`.

        Overwrites the logits.
        """
        logits /= self.temperature
        log_z = logits.logsumexp(dim=-1)
        log_p, ids = self.target(chunk)
        log_q = (logits[:, : self.vocabulary] if ids is None else logits.gather(-1, ids)) - log_z[:, None]
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1) * self.temperature**2, log_z

    def grad_logits(self, chunk: slice, logits: Tensor, log_z: Tensor, gradient: Tensor) -> Tensor:
        """w T (q − p) (m, vocabulary), times the loss's own `gradient` (m,); `log_z` as `divergence` returns it."""
        factor = (gradient * self.weights[chunk] * self.temperature)[:, None]
        result = (logits / self.temperature - log_z[:, None]).exp_().mul_(factor)
        log_p, ids = self.target(chunk)
        grad_p = log_p.exp_().mul_(-factor)
        if ids is None:
            result[:, : self.vocabulary] += grad_p
        else:
            result.scatter_add_(-1, ids, grad_p)
        return result
