"""Muon: orthogonalized momentum for hidden matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from pretrain.config.optimizers.muon import MuonConfig
from pretrain.engine.optimizers.adamw import count_step, fused_adamw
from pretrain.engine.optimizers.flat_buffers import FlatBuffer, Sharded, fused_update

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: raises small singular values fastest, and brings all near 1


class Muon(Sharded):
    """Step with gradient g, for each matrix p with momentum m:

        m ← m + (1 − momentum) (g − m)
        p ← (1 − rate · decay) p − rate · size · orthogonal(m, or with Nesterov g + momentum (m − g))

    where `size` compensates for the matrix's shape (`adjust_lr_fn`). AdamW updates all other parameters.

    Momentum is sharded like the parameters. Each matrix has a rank that makes it orthogonal: the rank receives the
    fragments of the matrix, and sends the fragments of the result back. The ranks share the matrices by cost.
    """

    config: MuonConfig

    def __init__(self, groups: ParamsT, config: MuonConfig):
        super().__init__(groups, config)
        self._assignments: dict[int, _Assignment] = {}

    def update(
        self, buffer: FlatBuffer, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any
    ) -> None:
        if group["algorithm"] == "muon":
            self._step_matrices(buffer, values, gradient, state, group)
        else:
            count_step(values, state)
            fused_adamw(values, gradient, state, group["lr"], group["weight_decay"], self.config.betas, self.config.eps)

    def _step_matrices(
        self, buffer: FlatBuffer, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any
    ) -> None:
        config = self.config
        if not state:
            state["momentum_buffer"] = torch.zeros_like(values)
        assigned = self._assignment(buffer)
        rates = [group["lr"] * size for size in assigned.sizes_of_updates]
        decay = group["lr"] * group["weight_decay"]
        if not fused_update(values.device) and assigned.ranks == 1:
            self._step_one_by_one(buffer, values, gradient, state["momentum_buffer"], rates, decay)
            return
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - config.momentum)
        direction = gradient.lerp(momentum, config.momentum) if config.nesterov else momentum
        updates = self._orthogonal(buffer, direction, assigned)
        values.mul_(1 - decay)
        torch._foreach_mul_(updates, rates)
        torch._foreach_sub_(buffer.split(values), updates)

    def _step_one_by_one(
        self, buffer: FlatBuffer, values: Tensor, gradient: Tensor, momentum: Tensor, rates: list[float], decay: float
    ) -> None:
        """`_step_matrices` if every matrix is whole, so that no matrix is copied to be sent."""
        config, dtype = self.config, _DTYPES[self.config.newton_schulz_dtype]
        for fragment, rate in zip(buffer.fragments, rates, strict=True):
            new = fragment.view(gradient)
            direction = fragment.view(momentum).lerp_(new, 1 - config.momentum)
            if config.nesterov:
                direction = new.lerp(direction, config.momentum)
            matrix = direction.to(device=self._device, dtype=dtype).view(fragment.shape)
            update = orthogonal(matrix, config.ns_steps).to(values).reshape(-1)
            fragment.view(values).mul_(1 - decay).sub_(update, alpha=rate)

    def _orthogonal(self, buffer: FlatBuffer, direction: Tensor, assigned: "_Assignment") -> list[Tensor]:
        """Makes each matrix in `direction` (size,) orthogonal. Returns this rank's fragments (size,) of the results."""
        directions = buffer.split(direction.to(device=self._device, dtype=_DTYPES[self.config.newton_schulz_dtype]))
        sent = torch.cat([directions[matrix] for matrix in assigned.order])
        received = self._exchange(sent, assigned.to_others, assigned.from_others)
        fragments = received.split(
            [assigned.sizes[matrix][rank] for rank in range(assigned.ranks) for matrix in assigned.own]
        )
        most = 1 << 25 if fused_update(received.device) else 1  # elements at once, since a GPU's launches cost time
        for batch in _batches([buffer.fragments[matrix].shape for matrix in assigned.own], most):
            parts = [part for number in batch for part in fragments[number :: len(assigned.own)]]
            shape = buffer.fragments[assigned.own[batch[0]]].shape
            done = orthogonal(torch.cat(parts).view(len(batch), *shape).squeeze(0), self.config.ns_steps)
            torch._foreach_copy_(parts, done.reshape(-1).split([part.numel() for part in parts]))
        returned = self._exchange(received, assigned.from_others, assigned.to_others).to(direction)
        results = returned.split([directions[matrix].numel() for matrix in assigned.order])
        return [result for _, result in sorted(zip(assigned.order, results, strict=True), key=lambda pair: pair[0])]

    def _exchange(self, sent: Tensor, to_ranks: list[int], from_ranks: list[int]) -> Tensor:
        """Sends `to_ranks[r]` elements to rank r. Returns the received ones in order: `from_ranks[r]` from rank r."""
        if self._process_group is None:
            return sent
        received = sent.new_empty(sum(from_ranks))
        dist.all_to_all_single(received, sent, from_ranks, to_ranks, group=self._process_group)
        return received

    def _assignment(self, buffer: FlatBuffer) -> "_Assignment":
        if id(buffer.tensor) not in self._assignments:
            own = torch.tensor([fragment.size for fragment in buffer.fragments], device=self._device)
            rank, by_rank = 0, [own]
            if group := self._process_group:
                rank, by_rank = dist.get_rank(group), [torch.empty_like(own) for _ in range(group.size())]
                dist.all_gather(by_rank, own, group=group)
            self._assignments[id(buffer.tensor)] = _Assignment(
                buffer, torch.stack(by_rank, dim=1).tolist(), rank, self.config.adjust_lr_fn
            )
        return self._assignments[id(buffer.tensor)]


class _Assignment:
    """Which rank makes which matrix of a flat buffer orthogonal.

    Attributes:
        own: this rank's matrices.
        order: all matrices, by rank.
        sizes: the number of elements of each matrix on each rank.
        sizes_of_updates: `size_of_update` of each matrix.
    """

    def __init__(self, buffer: FlatBuffer, sizes: list[list[int]], rank: int, adjust_lr_fn: str):
        self.sizes_of_updates = [size_of_update(fragment.shape, adjust_lr_fn) for fragment in buffer.fragments]
        self.sizes, self.ranks = sizes, len(sizes[0])
        owned = balanced([_cost(fragment.shape) for fragment in buffer.fragments], self.ranks)
        self.own = owned[rank]
        self.order = [matrix for matrices in owned for matrix in matrices]
        self.to_others = [sum(sizes[matrix][rank] for matrix in matrices) for matrices in owned]
        self.from_others = [sum(sizes[matrix][other] for matrix in self.own) for other in range(self.ranks)]


def balanced(costs: list[float], ranks: int) -> list[list[int]]:
    """Positions in `costs` for each rank. The costliest come first; each goes to the rank with the lowest total."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for position in sorted(range(len(costs)), key=lambda position: -costs[position]):
        rank = loads.index(min(loads))
        owned[rank].append(position)
        loads[rank] += costs[position]
    return owned


def _cost(shape: tuple[int, ...]) -> float:
    """The multiplications of a Newton–Schulz step."""
    least, most = sorted(shape)
    return least * least * (2.0 * most + least)


def _batches(shapes: list[tuple[int, ...]], most: int) -> list[list[int]]:
    """Positions in `shapes`, grouped by shape. A group has at most `most` elements in all, or one matrix."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for position, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(position)
    found = []
    for shape, positions in by_shape.items():
        length = max(1, most // math.prod(shape))
        found += [positions[first : first + length] for first in range(0, len(positions), length)]
    return found


def orthogonal(matrices: Tensor, steps: int) -> Tensor:
    """(rows, columns) or (matrices, rows, columns) with the singular vectors of each matrix and singular values of
    about 1, by Newton–Schulz."""
    a, b, c = _QUINTIC
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a, alpha=1.0)
    return x.mT if tall else x


def size_of_update(shape: tuple[int, ...], adjust_lr_fn: str) -> float:
    """The factor of an orthogonal update of this shape, see `MuonConfig`."""
    rows, columns = shape
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
