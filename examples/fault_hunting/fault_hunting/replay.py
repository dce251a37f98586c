"""Replay: some steps are computed twice, to detect arithmetic that is silently wrong.

Before such a step, each rank computes the gradient of its first micro-batch, from the weights, rows and dropout of the
step itself. With several ranks, each rank also computes the gradient of the rank before it. During the step, hooks on
parameters read the same gradient once more, before it is accumulated and reduced. All three must be equal to the bit.

On GPUs without `compute.deterministic`, arithmetic doesn't repeat to the bit. There, norms and sums of gradients are
compared, relative to the norm. The tolerance is 10 × the spread: the largest difference of any tensor among the three
repetitions of the first replay, or in a later replay without a finding. The spread is at least a standard deviation of
the noisiest tensor, so ten of them don't occur by chance.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.loading.batches import Batch
from fault_hunting.findings import Finding, checked_interval, named, place
from pretrain.engine.checkpoint.engine_state import fingerprint
from pretrain.engine.ranks import all_gather
from pretrain.run import watchdog
from pretrain.run.environment import Machine
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer

_SHARE = 0.002  # of the forward and backward passes of training that replays may add
_OWN = 1.25  # passes that a replay takes on a single rank, with its fingerprints
_REPEATS = 3  # of the first replay, if arithmetic doesn't repeat to the bit
_SPREADS = 10.0
_LEAST_SPREAD = 1e-4  # later steps may use other kernels than the first
_Form = dict[str, tuple[int, ...]]  # of a micro-batch: the shapes of its tensors, which are int64


def interval(micro_batches: int, ranks: int, save_every: int) -> int:
    """Steps between replays, with so many `micro_batches` per step and rank.

    As few steps as add at most 0.2 % to the passes of training. They divide the steps between saves, or are a multiple
    of them, so that a saved step has just been replayed.
    """
    passes = _OWN if ranks == 1 else 2.0
    least = -(-round(passes / _SHARE) // micro_batches)
    if least > save_every:
        return -(-least // save_every) * save_every
    small = [steps for steps in range(1, math.isqrt(save_every) + 1) if save_every % steps == 0]
    return min(steps for one in small for steps in (one, save_every // one) if steps >= least)


class Replay(Callback):
    """Replays the first step after a start, and then one step every `every_steps` steps. "auto": as often as adds at
    most 0.2 % to the forward and backward passes.

    Attributes:
        found: the finding of the last replay.
        clean: the last step without a finding. After a finding, later checkpoints of this run may be wrong.
    """

    clean = _began = -1
    found: Finding | None = None

    def __init__(self, every_steps: int | Literal["auto"] = "auto"):
        self._asked = checked_interval(every_steps)

    def before_training(self, trainer: Trainer) -> None:
        config, engine = trainer.config, trainer.engine
        self._engine, self._machines, self._layout = engine, trainer.report.machines, trainer.layout
        auto = interval(self._layout.accumulation, trainer.run.world.size, config.checkpoint.every_steps)
        self._every = auto if self._asked == "auto" else self._asked
        self._model: nn.Module = engine.module
        self._names = [name for name, _ in self._model.named_parameters()]
        self._repeats = engine.device.type == "cpu" or config.compute.deterministic
        self._spread: float | None = 0.0 if self._repeats else None  # None: not measured yet
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._next = next_of(all_gather(arithmetic(self._rank, self._machines), str))

    def before_steps(self, trainer: Trainer) -> None:
        step = trainer.state.step
        self.clean = step if self._began < 0 else min(self.clean, step)
        self._began = step

    @contextlib.contextmanager
    def during_step(self, trainer: Trainer, micro_batches: list[Batch]) -> Iterator[None]:
        step = trainer.state.step
        if (step + 1) % self._every and step != self._began:
            yield
            return
        tables = self._replayed(step, trainer.state.position, micro_batches)
        with self._taken(first_pass=True) as real:
            yield
        self._compare(step, torch.stack([real, *tables]))

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Raises FailedError if gradients of this step are wrong. All since the last clean replay may be wrong, too.

        The next attempt resumes from the newest checkpoint on disk that isn't later than the last clean replay. Later
        checkpoints are set aside; with replays at each save there are none. The oldest checkpoint stays in any case:
        without it the run would begin anew.
        """
        if self.found is not None:
            self.found.end_run(trainer, f"nothing was wrong at step {self.clean}", self.clean)

    def _taken(self, first_pass: bool = False) -> contextlib.AbstractContextManager[Tensor]:
        return taken(self._model, self._engine.device, self._repeats, first_pass)

    def _replayed(self, step: int, position: int, batches: list[Batch]) -> list[Tensor]:
        """The fingerprints of the gradients of this rank's first micro-batch, and of the first micro-batch of the rank
        before. If arithmetic doesn't repeat to the bit, the first replay also measures the spread."""
        counted = self._engine.counted(batches)

        def computed(batch: Batch, rank: int) -> Tensor:
            watchdog.alive()
            first, *_ = replace(self._layout, rank=rank).row_offsets(position, len(batches))
            with self._taken() as table:
                self._engine.replay(step, first, batch, counted)
            return table

        again = computed(batches[0], self._rank)
        if self._spread is None:
            others = [computed(batches[0], self._rank) for _ in range(_REPEATS - 1)]
            self._spread = max(_LEAST_SPREAD, largest_difference([again, *others]))
        if all(rank == after for rank, after in enumerate(self._next)):
            return [again, again]
        return [again, computed(*passed_on(batches[0], self._next, self._engine.device))]

    def _compare(self, step: int, own: Tensor) -> None:
        """Compares the tables (3, parameters, 2) of all ranks: of the step, of its replay, of the rank before."""
        gathered = [torch.empty_like(own) for _ in range(self._ranks)]
        dist.all_gather(gathered, own)
        real, again, of_before = torch.stack(gathered, dim=1).cpu()
        by_next = of_before[self._next]
        repeated, shared = self._differ(real, again), self._differ(again, by_next)
        self.found = judged(repeated, shared, self._next, self._names, self._machines)
        if self.found is None:
            self.clean = step + 1
            if self._spread:
                spreads = (float(difference(real, one).max()) for one in (again, by_next))
                self._spread = max(self._spread, *spreads)

    def _differ(self, one: Tensor, other: Tensor) -> Tensor:
        """(ranks, parameters) True if two fingerprints (ranks, parameters, 2) are of different gradients."""
        if self._repeats:
            return (one != other).any(dim=-1)
        assert self._spread is not None
        return difference(one, other) > _SPREADS * self._spread


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
                judged = fingerprint if repeats else norm_and_sum
                table[number] = judged(gradient.detach().reshape(-1))
            return None if first_pass else gradient.new_zeros(()).expand_as(gradient)

        return hook

    handles = [one.register_hook(take(number)) for number, one in enumerate(parameters)]
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
        all_gather({}, _Form)
        return batch, before
    own = {name: tensor.to(device).contiguous() for name, tensor in batch.items()}
    form = all_gather({name: tuple(tensor.shape) for name, tensor in own.items()}, _Form)[before]
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
