"""Linear layers of a few rows whose weights don't change: most of the time of decoding goes into these."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.kernels.matmul import multiplies_bf16

PackedLinear = Callable[[Tensor], Tensor]  # (…, inputs) → (…, outputs)

_ROWS = 8  # the layout that oneDNN chooses for this number of rows is the fastest or close to it from 4 to 32
_FEW, _MANY = 4, 64  # outside of these numbers of rows, `F.linear` is the fastest in fp32
# fp32 matrices of up to this number of weights are multiplied fastest as they are, transposed, by instruction set
_SMALL = {"AVX512": 2**20, "AVX2": 2**18}


def packed_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """x ↦ x · weightᵀ + bias, which `F.linear` defines; `weight` (outputs, inputs).

    On a CPU, the weights are copied once into the order in which the product reads them; `F.linear` does that, or reads
    out of order, in each product. On one core of a Xeon with AMX, 8 rows by 512 × 32,128 weights take 4.3 ms instead of
    9.1 in fp32 and 1.6 instead of 2.4 in bf16.
    """
    weight, bias = weight.detach(), None if bias is None else bias.detach()

    def plain(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    if weight.device.type != "cpu":
        return plain
    fast = _laid_out(weight, bias)
    if fast is None:
        return plain
    least = _FEW if weight.dtype == torch.float32 else 0

    def packed(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        return fast(rows).view(*x.shape[:-1], -1) if least <= len(rows) <= _MANY else plain(x)

    return packed


def _laid_out(weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
    """The product with a copy of `weight` in the best order; None if the order doesn't matter or isn't known."""
    if weight.dtype == torch.float32 and weight.numel() <= _SMALL.get(torch.backends.cpu.get_cpu_capability(), 2**20):
        transposed = weight.t().contiguous()
        return lambda x: x @ transposed if bias is None else torch.addmm(bias, x, transposed)
    if not can_pack(weight.dtype):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN, as part of PyTorch, has fast products of `dtype` on this CPU: of bf16 only with AVX-512."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bf16())
