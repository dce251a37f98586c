"""Cross-entropy of rows of logits: one read for the losses, one read and one write in place for the gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8
# each number of targets would else begin the second row of the losses at another alignment, and be compiled for it
_UNALIGNED = ["TARGETS", "LOSSES", "LOG_Z", "GRAD_SOFTMAX", "GRAD_TARGETS"]


def losses(logits: Tensor, targets: Tensor, z_loss: float, smoothing: float) -> tuple[Tensor, Tensor]:
    """(losses, log Z), each (n,) and fp32, of contiguous logits (n, vocabulary) and targets (n,) without ignored ones.

    A loss is z · (log Z)² + log Z − (1 − s) · logit of the target − s · mean of the logits. On the meta device nothing
    is computed.
    """
    found = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    if len(logits) and not logits.is_meta:
        forward_rows[(len(logits),)](
            logits, targets, found[0], found[1], logits.size(1), z_loss, smoothing, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return found[0], found[1]


def logits_to_grad_(
    logits: Tensor, targets: Tensor, log_z: Tensor, grad_softmax: Tensor, grad_targets: Tensor, smoothing: float
) -> None:
    """Overwrites the logits by `grad_softmax` · softmax − `grad_targets` · ((1 − s) [target] + s / vocabulary)."""
    if len(logits) and not logits.is_meta:
        backward_rows[(len(logits), triton.cdiv(logits.size(1), _BLOCK))](
            logits,
            targets,
            log_z,
            grad_softmax,
            grad_targets,
            logits.size(1),
            smoothing,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def forward_rows(LOGITS, TARGETS, LOSSES, LOG_Z, vocabulary, z_loss, smoothing, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = LOGITS + row * vocabulary
    # each lane has a running maximum and sum of its own, so that the loop over the vocabulary reduces nothing
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, vocabulary, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(base + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, values)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp(top - shift) + tl.exp(values - shift)
        total += tl.where(at < vocabulary, values, 0.0)
        top = higher
    highest = tl.max(top, 0)
    log_z = highest + tl.log(tl.sum(weight * tl.exp(top - highest), 0))
    target = tl.load(base + tl.load(TARGETS + row)).to(tl.float32)
    expected = (1.0 - smoothing) * target + smoothing * (tl.sum(total, 0) / vocabulary)
    tl.store(LOSSES + row, z_loss * log_z * log_z + log_z - expected)
    tl.store(LOG_Z + row, log_z)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def backward_rows(LOGITS, TARGETS, LOG_Z, GRAD_SOFTMAX, GRAD_TARGETS, vocabulary, smoothing, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = LOGITS + row * vocabulary + at
    grad_target = tl.load(GRAD_TARGETS + row)
    values = tl.load(address, mask=at < vocabulary, other=0.0).to(tl.float32)
    gradient = (
        tl.exp(values - tl.load(LOG_Z + row)) * tl.load(GRAD_SOFTMAX + row) - smoothing / vocabulary * grad_target
    )
    gradient = tl.where(at == tl.load(TARGETS + row), gradient - (1.0 - smoothing) * grad_target, gradient)
    tl.store(address, gradient.to(LOGITS.dtype.element_ty), mask=at < vocabulary)
