"""The matrix products of a model's layers: their shapes, and how fast a device computes them by themselves.

Their rate is the most that a training step can reach with these shapes. Where they are small, it is less than the data
sheet's.
"""

import re
import time
from collections import Counter

import torch
from torch import Tensor

from pretrain.kernels.matmul import matmul
from pretrain.models.layers import Linear
from pretrain.models.model import Model
from pretrain.models.t5gemma2 import MergedAttention

Shape = tuple[int, int, int]  # rows, inputs and outputs of a layer
_OF_INPUTS = re.compile(r"encoder\b|.*cross_attention\.[kv]$")
_HEAD = "lm_head"
_MOST_ROWS = 8192  # more aren't any faster
_TIMES = 3


def products(model: Model, inputs: int, targets: int) -> Counter[Shape]:
    """How often a forward pass over `inputs` and `targets` tokens has a product of each shape."""

    def rows(name: str) -> int:
        own = bool(_OF_INPUTS.match(name)) if model.decoder_reads_targets else name != _HEAD
        return inputs if own else targets

    modules = dict(model.named_modules())
    matrices = [(rows(name), one) for name, one in modules.items() if isinstance(one, Linear) or name == _HEAD]
    merged = [one for one in modules.values() if isinstance(one, MergedAttention)]
    matrices += [(inputs, matrix) for one in merged for matrix in (one.k, one.v)]
    return Counter((count, *reversed(matrix.weight.shape)) for count, matrix in matrices)


def products_flops(shapes: Counter[Shape], dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of all the products, forward and backward: outputs, gradients of inputs, gradients of weights."""
    work, seconds = 0.0, 0.0
    generator = torch.Generator(device).manual_seed(0)  # its own: the global generator is not touched
    for (rows, inputs, outputs), count in shapes.items():
        some = min(rows, _MOST_ROWS)
        x, w, y = (
            torch.rand(*size, device=device, generator=generator).to(dtype)
            for size in ((some, inputs), (outputs, inputs), (some, outputs))
        )
        each = sum(_seconds(left, right) for left, right in ((x, w.T), (y, w), (y.T, x)))
        work += count * 6.0 * rows * inputs * outputs
        seconds += count * each * rows / some
    return work / seconds


def _seconds(left: Tensor, right: Tensor) -> float:
    """The shortest of some measured products; the first, which isn't measured, chooses a kernel."""
    _wait_for(matmul(left, right))
    taken = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        _wait_for(matmul(left, right))
        taken.append(time.perf_counter() - started)
    return min(taken)


def _wait_for(result: Tensor) -> None:
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
