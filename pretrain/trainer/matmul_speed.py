"""The matrix products of a model's layers: their shapes, and how fast a device computes them by themselves.

Their rate is the most that a training step can reach with these shapes. Where they are small, it is less than the data
sheet's.
"""

import time
from collections import Counter

import torch
from torch import Tensor

from pretrain.kernels.matmul import matmul
from pretrain.models.flops import matrices
from pretrain.models.model import Model

Shape = tuple[int, int, int]  # rows, inputs and outputs of a layer
_MOST_ROWS = 8192  # more aren't any faster
_TIMES = 3


def products(model: Model, inputs: int, targets: int) -> Counter[Shape]:
    """How often a forward pass over `inputs` and `targets` tokens has a product of each shape."""
    lengths = {"inputs": inputs, "targets": targets}
    known = [(lengths[rows], weight) for _, rows, weight in matrices(model) if rows in lengths]
    return Counter((count, weight.size(1), weight.size(0)) for count, weight in known)


def products_flops(shapes: Counter[Shape], dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of all the products, forward and backward: outputs, gradients of inputs, gradients of weights."""
    work, seconds = 0.0, 0.0
    generator = torch.Generator(device).manual_seed(0)  # its own: the global generator is not touched
    for (rows, inputs, outputs), count in shapes.items():
        timed = min(rows, _MOST_ROWS)
        x, w, y = (
            torch.rand(*size, device=device, generator=generator).to(dtype)
            for size in ((timed, inputs), (outputs, inputs), (timed, outputs))
        )
        each = sum(seconds_of(left, right) for left, right in ((x, w.T), (y, w), (y.T, x)))
        work += count * 6.0 * rows * inputs * outputs
        seconds += count * each * rows / timed
    return work / seconds


def seconds_of(left: Tensor, right: Tensor) -> float:
    """The shortest time of several products; the first, which isn't timed, chooses a kernel."""
    times = []
    for _ in range(1 + _TIMES):
        started = time.perf_counter()
        result = matmul(left, right)
        if result.is_cuda:
            torch.cuda.synchronize(result.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
