"""Fingerprints of weights. A checkpoint keeps the fingerprint of the weights that the run saved, and a load verifies
it.

The fingerprint of a tensor is two sums modulo 2**64 over its elements, read as integers: the sum of the elements, and
the sum of elements times positions. A single flipped bit always changes the first sum; several flips cancel out only by
chance. The sums of a tensor's shards add up to the sums of the tensor, so a fingerprint doesn't depend on the sharding.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.engine.engine import Engine

_PART = 2**20  # elements at once, since each takes 8 bytes or more as integers
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by the bytes of an element


def sums(values: Tensor, start: int = 0) -> Tensor:
    """The fingerprint (2,) int64 of a part of a tensor. `start`: position of the part in the flattened tensor."""
    found = torch.zeros(2, dtype=torch.int64, device=values.device)
    for first in range(0, values.numel(), _PART):
        part = values[first : first + _PART].contiguous().view(_INTEGERS[values.element_size()]).long()
        position = start + first + 1
        places = torch.arange(position, position + part.numel(), device=values.device)
        found += torch.stack([part.sum(), (part * places).sum()])
    return found


def sums_of_masters(engine: Engine, dtype: torch.dtype) -> Tensor:
    """(parameters, 2): fingerprints of the optimizer's fp32 weights, rounded to `dtype`, in the order of the model's
    parameters. All ranks call this."""
    numbers = {name: number for number, (name, _) in enumerate(engine.module.named_parameters())}
    found = torch.zeros(len(numbers), 2, dtype=torch.int64, device=engine.device)
    for fragment in engine.fragments():
        values = fragment.view(fragment.buffer.data).to(dtype)
        found[numbers[fragment.name]] += sums(values, fragment.start).to(found.device)
    dist.all_reduce(found)
    return found


def of_masters(engine: Engine) -> str:
    """A fingerprint of the optimizer's fp32 weights, independent of their shards. All ranks call this."""
    return hashlib.blake2b(sums_of_masters(engine, torch.float32).cpu().numpy().tobytes(), digest_size=16).hexdigest()
