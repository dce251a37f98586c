"""Replay: some steps are computed twice, to find arithmetic that is silently wrong.

Before such a step, each rank computes the gradient of its first micro-batch, from the weights, rows and dropout of the
step itself. Of several ranks, each also computes that of the rank before it. While the step runs, hooks on parameters
see the same gradient a last time, before DeepSpeed adds it up and reduces it. All three must be equal to the bit.

Where arithmetic doesn't repeat, on GPUs without `compute.deterministic`, norms and sums of gradients are compared
instead, relative to the norm. They may differ by ten times the spread: the greatest difference of any tensor that the
first replay sees, which computes three times, or a later one without a finding. That is a standard deviation or more of
the noisiest tensor, so ten of them are no chance.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.foundation.errors import FailedError
from data_pipeline.loading.batches import Batch
from pretrain.checkpoint.directory import set_aside_after
from pretrain.run import watchdog
from pretrain.run.environment import Machine, place
from pretrain.trainer.callback import Callback, Trainer
from pretrain.trainer.callbacks.fingerprints import Finding, named, sums
from pretrain.zero.ranks import of_all_ranks, on_rank_0

_SHARE = 0.002  # of the forward and backward passes of training, that replays may add
_OWN = 1.25  # passes that a replay by one rank alone takes, with its fingerprints
_REPEATS = 3  # of the first replay, where arithmetic doesn't repeat
_SPREADS = 10.0
_LEAST_SPREAD = 1e-4  # other steps may use other kernels than the first


def interval(setting: int | Literal["auto"] | None, micro_batches: int, ranks: int, save_every: int) -> int | None:
    """Steps from one replay to the next, as `faults.replay_every_steps` says, for `micro_batches` a step on each rank.

    "auto": as few as add at most 0.2 % to the passes of training. They divide the steps between saves, or are a
    multiple of them, so that a step that is saved has just been replayed.
    """
    if setting != "auto":
        return setting
    passes = _OWN if ranks == 1 else 2.0
    least = -(-round(passes / _SHARE) // micro_batches)
    if least > save_every:
        return -(-least // save_every) * save_every
    return next(steps for steps in range(least, save_every + 1) if save_every % steps == 0)


class Replaying(Callback):
    """`faults.replay_every_steps`: replays a step every so many steps, and the first one after a start.

    `found`: what the last replay has found. `clean`: the step up to which nothing was found; later checkpoints of this
    run may hold wrong sums if something is found.
    """

    clean = _began = -1
    found: Finding | None = None

    def before_training(self, trainer: Trainer) -> None:
        config, engine = trainer.config, trainer.engine
        self._engine, self._machines = engine, trainer.report.machines
        self._every = interval(
            config.faults.replay_every_steps,
            trainer.layout.accumulation,
            trainer.run.ranks,
            config.checkpoint.every_steps,
        )
        self._model: nn.Module = engine.deepspeed.module
        self._names = [name for name, _ in self._model.named_parameters()]
        self._repeats = engine.device.type == "cpu" or config.compute.deterministic
        self._spread: float | None = 0.0 if self._repeats else None  # None: not measured yet
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._next = next_of(of_all_ranks(_arithmetic(self._rank, self._machines))) if self._every else []

    def before_steps(self, trainer: Trainer) -> None:
        step = trainer.state.step
        self.clean = step if self._began < 0 else min(self.clean, step)
        self._began = step

    @contextlib.contextmanager
    def during_step(self, trainer: Trainer) -> Iterator[None]:
        step = trainer.before.step
        if self._every is None or ((step + 1) % self._every and step != self._began):
            yield
            return
        tables = self._replayed(step, trainer.before.position, trainer.micro_batches)
        with self._fingerprints(first_pass=True) as real:
            yield
        self._compare(step, torch.stack([real, *tables]))

    def after_step(self, trainer: Trainer) -> None:
        """Raises FailedError if gradients are wrong: those of this step, and maybe all since the last clean replay.

        The next attempt goes on from the newest checkpoint on disk that isn't later than that replay. Later ones are
        set aside. With replays at each save there are none. The oldest stays in any case: the run would begin anew.
        """
        if self.found is None:
            return
        self.found.tell(trainer)
        trainer.drop_unsaved()
        clean, run = self.clean, trainer.run.directory
        aside = on_rank_0(lambda: set_aside_after(run, clean))
        renamed = f"; {', '.join(path.name for path in aside)}: set aside" if aside else ""
        raise FailedError(f"step {trainer.step}: {self.found.what}; nothing was wrong at step {clean}{renamed}")

    def _replayed(self, step: int, position: int, batches: list[Batch]) -> list[Tensor]:
        """The fingerprints of this rank's first micro-batch, and of that of the rank before; more in the first replay,
        where arithmetic doesn't repeat."""
        counted = self._engine.counted(batches)

        def computed(batch: Batch, rank: int) -> Tensor:
            watchdog.alive()
            with self._fingerprints() as table:
                self._engine.replay(step, position, rank, len(batches), batch, counted)
            return table

        again = computed(batches[0], self._rank)
        if self._spread is None:
            others = [computed(batches[0], self._rank) for _ in range(_REPEATS - 1)]
            self._spread = self._measured([again, *others])
        if all(rank == after for rank, after in enumerate(self._next)):
            return [again, again]
        return [again, computed(*self._passed_on(batches[0]))]

    @contextlib.contextmanager
    def _fingerprints(self, first_pass: bool = False) -> Iterator[Tensor]:
        """(parameters, 2): within the block, filled with fingerprints of gradients. Zeros: there was no gradient.

        `first_pass`: those of the first pass alone, which trains. Otherwise hooks replace each gradient by a zero, so
        that memory never holds all of them.
        """
        dtype = torch.int64 if self._repeats else torch.float64
        table = torch.zeros(len(self._names), 2, dtype=dtype, device=self._engine.device)
        passes = 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        def take(number: int) -> Callable[[Tensor], Tensor | None]:
            def hook(gradient: Tensor) -> Tensor | None:
                if passes == 1:
                    taken = sums if self._repeats else norm_and_sum
                    table[number] = taken(gradient.detach().reshape(-1))
                return None if first_pass else gradient.new_zeros(()).expand_as(gradient)

            return hook

        trained = [(number, one) for number, one in enumerate(self._model.parameters()) if one.requires_grad]
        handles = [one.register_hook(take(number)) for number, one in trained]
        handles.append(self._model.register_forward_pre_hook(count))
        try:
            yield table
        finally:
            for handle in handles:
                handle.remove()

    def _passed_on(self, batch: Batch) -> tuple[Batch, int]:
        """Sends this rank's micro-batch to the rank after it; returns that of the rank before it, and that rank."""
        after, before = self._next[self._rank], self._next.index(self._rank)
        if after == self._rank:
            of_all_ranks(None)
            return batch, before
        own = {name: tensor.to(self._engine.device).contiguous() for name, tensor in batch.items()}
        form = of_all_ranks([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()])[before]
        theirs = {name: torch.empty(shape, dtype=dtype, device=self._engine.device) for name, shape, dtype in form}
        sent = [dist.P2POp(dist.isend, one, after, tag=number) for number, one in enumerate(own.values())]
        received = [dist.P2POp(dist.irecv, one, before, tag=number) for number, one in enumerate(theirs.values())]
        for work in dist.batch_isend_irecv([*sent, *received]):
            work.wait()
        return theirs, before

    def _measured(self, tables: list[Tensor]) -> float:
        """The greatest relative difference between `tables` of one gradient, on any rank."""
        pairs = [_difference(one, other).max() for number, one in enumerate(tables) for other in tables[:number]]
        found = torch.stack(pairs).max()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return max(float(found), _LEAST_SPREAD)

    def _compare(self, step: int, own: Tensor) -> None:
        """Compares all ranks' tables (3, parameters, 2): of the step, again, and of the rank before."""
        gathered = [torch.empty_like(own) for _ in range(self._ranks)]
        dist.all_gather(gathered, own)
        real, again, of_before = torch.stack(gathered, dim=1).cpu()
        by_next = of_before[self._next]
        self.found = self._judged(self._differ(real, again), self._differ(again, by_next))
        if self.found is None:
            self.clean = step + 1
            if self._spread:
                self._spread = max(self._spread, *(float(_difference(real, one).max()) for one in (again, by_next)))

    def _differ(self, one: Tensor, other: Tensor) -> Tensor:
        """(ranks, parameters) Whether two fingerprints (ranks, parameters, 2) aren't those of one gradient."""
        if self._repeats:
            return (one != other).any(dim=-1)
        assert self._spread is not None
        return _difference(one, other) > _SPREADS * self._spread

    def _judged(self, repeated: Tensor, by_next: Tensor) -> Finding | None:
        """The finding, from the gradients (ranks, parameters) that differ on one rank, and between a rank and the next.

        A rank that doesn't repeat itself is named. So is the one that all differences between two ranks have in common;
        of two ranks, and after a single difference, it can't be told.
        """
        odd = repeated.any(dim=1).nonzero().flatten().tolist()
        if odd:
            tensors = named(self._names, repeated[odd].any(dim=0))
            return self._finding(odd, f"computes different gradients from the same micro-batch: {tensors}")
        pairs = [{rank, self._next[rank]} for rank in by_next.any(dim=1).nonzero().flatten().tolist()]
        if not pairs:
            return None
        ranks = sorted(set.intersection(*pairs)) or sorted(set.union(*pairs))
        tensors = named(self._names, by_next.any(dim=0))
        return self._finding(ranks, f"computes other gradients than other ranks from the same micro-batch: {tensors}")

    def _finding(self, ranks: list[int], what: str) -> Finding:
        listed = [f"rank {rank} ({', '.join(place(rank, self._machines))})" for rank in ranks]
        if len(ranks) == 1:
            return Finding(f"{listed[0]} {what}", ranks[0])
        return Finding(f"one of {', '.join(listed)} {what}")


def norm_and_sum(values: Tensor) -> Tensor:
    """(2,) fp64: the L2 norm of a gradient, and the sum of its elements, which a changed sign changes too.

    NaN counts as 0 and infinity as a large number, so that they can be compared.
    """
    found = [torch.linalg.vector_norm(values, dtype=torch.float64), values.sum(dtype=torch.float64)]
    return torch.stack(found).nan_to_num(posinf=1e300, neginf=-1e300)


def next_of(arithmetic: Sequence[str]) -> list[int]:
    """For each rank, the one that computes its micro-batch too: the next one of the same arithmetic, in a ring."""
    alike = {kind: [rank for rank, one in enumerate(arithmetic) if one == kind] for kind in arithmetic}
    after = {rank: ring[(place + 1) % len(ring)] for ring in alike.values() for place, rank in enumerate(ring)}
    return [after[rank] for rank in range(len(arithmetic))]


def _arithmetic(rank: int, machines: Sequence[Machine]) -> str:
    """The facts that decide how a rank rounds: two ranks with the same of it have the same results."""
    device, threads = place(rank, machines)[1].partition(": ")[2] or place(rank, machines)[1], torch.get_num_threads()
    return f"{device}, {threads} threads, PyTorch {torch.__version__}, {os.uname().machine}"


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """(…) Relative differences of norms and sums (…, 2), by the norm; 0 where both are 0."""
    norms = torch.maximum(one[..., 0], other[..., 0])
    return (one - other).abs().amax(dim=-1) / norms.where(norms != 0, 1.0)
