"""For `replay.py`: fingerprints of gradients that are computed twice, the ranks that compute the same gradient, and the
meaning of a difference."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.loading.batches import Batch
from pretrain.engine.ranks import of_all_ranks
from pretrain.run.environment import Machine, place
from pretrain.training.callbacks.silent_errors.fingerprints import Finding, named, sums

_Form = dict[str, tuple[int, ...]]  # of a micro-batch: the shapes of its tensors, which are int64


@contextlib.contextmanager
def taken(model: nn.Module, device: torch.device, repeats: bool, first_pass: bool = False) -> Iterator[Tensor]:
    """Yields a table (parameters, 2), which is filled with fingerprints of gradients within the block. Zeros: no
    gradient.

    `repeats`: fingerprints of the bits; otherwise norms and sums. `first_pass`: only the first pass is fingerprinted,
    and it trains. Otherwise hooks replace each gradient by zero, so that memory never holds all gradients.
    """
    parameters = [*model.parameters()]
    dtype = torch.int64 if repeats else torch.float64
    table = torch.zeros(len(parameters), 2, dtype=dtype, device=device)
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    def take(number: int) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            if passes == 1:
                fingerprint = sums if repeats else norm_and_sum
                table[number] = fingerprint(gradient.detach().reshape(-1))
            return None if first_pass else gradient.new_zeros(()).expand_as(gradient)

        return hook

    trained = [(number, one) for number, one in enumerate(parameters) if one.requires_grad]
    handles = [one.register_hook(take(number)) for number, one in trained]
    handles.append(model.register_forward_pre_hook(count))
    try:
        yield table
    finally:
        for handle in handles:
            handle.remove()


def norm_and_sum(values: Tensor) -> Tensor:
    """(2,) fp64: the L2 norm of a gradient, and the sum of its elements, which a changed sign changes too.

    NaN counts as 0 and infinity as a large number, so that they can be compared.
    """
    found = [torch.linalg.vector_norm(values, dtype=torch.float64), values.sum(dtype=torch.float64)]
    return torch.stack(found).nan_to_num(posinf=1e300, neginf=-1e300)


def difference(one: Tensor, other: Tensor) -> Tensor:
    """(…) Differences of norms and sums (…, 2), relative to the norm; 0 if both norms are 0."""
    norms = torch.maximum(one[..., 0], other[..., 0])
    return (one - other).abs().amax(dim=-1) / norms.where(norms != 0, 1.0)


def largest_difference(tables: Sequence[Tensor]) -> float:
    """The largest relative difference between `tables` of one gradient, on any rank."""
    pairs = [difference(one, other).max() for number, one in enumerate(tables) for other in tables[:number]]
    found = torch.stack(pairs).max()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def arithmetic(rank: int, machines: Sequence[Machine]) -> str:
    """The facts that decide how a rank rounds. Ranks with equal facts have equal results."""
    device = place(rank, machines)[1]  # "GPU 1: NVIDIA H100", or the CPU's model
    device = device.partition(": ")[2] or device
    return f"{device}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}, {os.uname().machine}"


def next_of(kinds: Sequence[str]) -> list[int]:
    """For each rank, the rank that computes its micro-batch too: the next rank with the same arithmetic, in a ring."""
    alike = {kind: [rank for rank, one in enumerate(kinds) if one == kind] for kind in kinds}
    after = {rank: ring[(place + 1) % len(ring)] for ring in alike.values() for place, rank in enumerate(ring)}
    return [after[rank] for rank in range(len(kinds))]


def passed_on(batch: Batch, following: Sequence[int], device: torch.device) -> tuple[Batch, int]:
    """Sends this rank's micro-batch to the rank `following` it. Returns the micro-batch of the rank before, and that
    rank."""
    rank = dist.get_rank()
    after, before = following[rank], following.index(rank)
    if after == rank:
        of_all_ranks({}, _Form)
        return batch, before
    own = {name: tensor.to(device).contiguous() for name, tensor in batch.items()}
    form = of_all_ranks({name: tuple(tensor.shape) for name, tensor in own.items()}, _Form)[before]
    theirs = {name: torch.empty(shape, dtype=torch.long, device=device) for name, shape in form.items()}
    sent = [dist.P2POp(dist.isend, one, after, tag=number) for number, one in enumerate(own.values())]
    received = [dist.P2POp(dist.irecv, one, before, tag=number) for number, one in enumerate(theirs.values())]
    for work in dist.batch_isend_irecv([*sent, *received]):
        work.wait()
    return theirs, before


def judged(
    repeated: Tensor, by_next: Tensor, following: Sequence[int], names: list[str], machines: Sequence[Machine]
) -> Finding | None:
    """The finding, from the gradients (ranks, parameters) that differ on one rank, and between a rank and the next.

    The finding names a rank that doesn't repeat itself, or the rank that all differences between two ranks have in
    common. With two ranks, or a single difference, that rank isn't known.
    """
    odd = repeated.any(dim=1).nonzero().flatten().tolist()
    if odd:
        tensors = named(names, repeated[odd].any(dim=0))
        return _finding(odd, machines, f"computes different gradients from the same micro-batch: {tensors}")
    pairs = [{rank, following[rank]} for rank in by_next.any(dim=1).nonzero().flatten().tolist()]
    if not pairs:
        return None
    ranks = sorted(set.intersection(*pairs)) or sorted(set.union(*pairs))
    tensors = named(names, by_next.any(dim=0))
    return _finding(ranks, machines, f"computes other gradients than other ranks from the same micro-batch: {tensors}")


def _finding(ranks: list[int], machines: Sequence[Machine], what: str) -> Finding:
    listed = [f"rank {rank} ({', '.join(place(rank, machines))})" for rank in ranks]
    if len(ranks) == 1:
        return Finding(f"{listed[0]} {what}", ranks[0])
    return Finding(f"one of {', '.join(listed)} {what}")
