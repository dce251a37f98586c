"""Checks at the start of a run that DeepSpeed keeps the weights where `deepspeed_private.py` reads them."""

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from data_pipeline.base.errors import FailedError
from pretrain.engine.deepspeed_private import flat_buffers, fragments, local_weights
from pretrain.engine.optimizers.flat_buffers import Fragment
from pretrain.engine.versions import REPORT

_ENDS = (slice(None, 1000), slice(-1000, None))  # the compared elements of a fragment


def check_layout(engine: DeepSpeedEngine) -> None:
    """Raises FailedError if DeepSpeed's fragments aren't the expected ones. All ranks call this together.

    Over all ranks, the fragments of a trained parameter must cover each of its elements once. The fp32 elements, cast
    to the model's precision, must equal the weights that the model computes with. Only the ends of fragments are
    compared.
    """
    of_all = [fragment for buffer in flat_buffers(engine) for fragment in buffer.fragments]
    # the number of elements and the sum of their positions show together that each is there once
    found = torch.tensor(
        [[one.size, (2 * one.start + one.size - 1) * one.size // 2] for one in of_all], device=engine.device
    )
    dist.all_reduce(found)
    for one, covered in zip(of_all, found.tolist(), strict=True):
        size = torch.Size(one.shape).numel()
        if covered != [size, size * (size - 1) // 2]:
            raise FailedError(f"DeepSpeed's fragments of {one.name} don't cover each of its elements once: {REPORT}")
    wrong = torch.tensor(_differ(engine), device=engine.device)
    dist.all_reduce(wrong)
    if int(wrong):
        raise FailedError(f"DeepSpeed's fp32 weights are not those that the model computes with: {REPORT}")


def _differ(engine: DeepSpeedEngine) -> int:
    """The number of fragments on this rank whose fp32 weights aren't those of the model."""
    weights = local_weights(engine)
    if weights is None:  # they are on NVMe
        return 0
    by_name = dict(zip((name for name, _ in engine.module.named_parameters()), weights, strict=True))
    return sum(not _same(fragment, *by_name[fragment.name][:2]) for fragment in fragments(engine))


def _same(fragment: Fragment, weights: Tensor, first: int) -> bool:
    """True if a fragment equals, at its ends, the `weights` (n,) of its parameter, which begin at element `first`."""
    live = weights.narrow(0, fragment.start - first, fragment.size)
    master_weights = fragment.view(fragment.buffer.data)
    return all(torch.equal(master_weights[end].to(live.device, live.dtype), live[end]) for end in _ENDS)
