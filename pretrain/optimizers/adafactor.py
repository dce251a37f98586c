"""Adafactor (Shazeer and Stern 2018) as T5 was trained with it (Raffel et al. 2020, section 3.1.2)."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from data_pipeline.foundation.errors import FailedError
from pretrain.config.optimizers import AdafactorConfig
from pretrain.optimizers.flat_buffers import FlatBuffer, sum_of_squares
from pretrain.optimizers.sharded import Sharded, root_mean_squares, sums_of_squares
from pretrain.optimizers.tiles import Tile, tiles


class Adafactor(Sharded):
    """Step t with gradient g, for each tensor p; all means are over the whole tensor (algorithms 4 and 5):

        V ← V + t^−decay_rate · (g² + ε₁ − V); for a matrix, only the means of its rows R and of its columns C
        U = g / √V; for a matrix, V is approximated by R Cᵀ / mean(R)
        p ← (1 − rate · decay) p − rate · max(ε₂, RMS(p)) · U / max(1, RMS(U) / clipping_threshold)

    Every rank holds the means of all tensors in its flat buffers: they are small.
    """

    config: AdafactorConfig

    def __init__(self, groups: ParamsT, config: AdafactorConfig):
        super().__init__(groups, config)
        self._moments: dict[int, _SecondMoments] = {}

    def update(
        self, buffer: FlatBuffer, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any
    ) -> None:
        config, moments = self.config, self._moments_of(buffer)
        if not state:
            state["step"] = torch.zeros((), device=values.device)
        state["step"] += 1
        step = state["step"].double()
        squares = sums_of_squares(buffer, values)
        sums = self.summed(torch.cat([squares.float(), moments.sums(gradient)]))
        parameters = len(buffer.fragments)
        moments.add(sums[parameters:], step**-config.decay_rate, config.eps[0])
        scales = moments.scales()
        factors = torch.full_like(squares, group["lr"])
        if config.multiply_by_parameter_scale:
            factors *= root_mean_squares(buffer, sums[:parameters].double()).clamp(min=config.eps[1])
        if config.clipping_threshold is not None:
            sizes = root_mean_squares(buffer, self.summed(moments.squares_of_update(gradient, scales)))
            factors /= (sizes / config.clipping_threshold).clamp(min=1.0)
        if group["weight_decay"]:
            values.mul_(1 - group["lr"] * group["weight_decay"])
        moments.subtract(values, gradient, scales, factors)

    def factored_state(self) -> dict[str, dict[str, Tensor]]:
        return {name: parts for moments in self._moments.values() for name, parts in moments.by_name().items()}

    def set_factored_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        for buffer in self._buffers.values():
            for name, parts in self._moments_of(buffer).by_name().items():
                found = state.get(name, {})
                for part, values in parts.items():
                    if part not in found or found[part].shape != values.shape:
                        raise FailedError(f"the checkpoint has no {part} of {name} in the shape {list(values.shape)}")
                    values.copy_(found[part])

    def _moments_of(self, buffer: FlatBuffer) -> "_SecondMoments":
        if id(buffer.tensor) not in self._moments:
            self._moments[id(buffer.tensor)] = _SecondMoments(buffer, self.config.min_dim_size_to_factor)
        return self._moments[id(buffer.tensor)]


class _SecondMoments:
    """Second moments of a flat buffer's parameters, concatenated in one vector: the means of a matrix's rows and
    columns, or all elements of another parameter."""

    def __init__(self, buffer: FlatBuffer, min_dim_size_to_factor: int):
        self._buffer = buffer
        self._names: list[list[str]] = []
        sizes: list[int] = []
        counts: list[int] = []  # how many elements each mean is over
        factored: list[int] = []
        self._starts: dict[tuple[int, str], int] = {}  # of a part in the vector, by parameter
        # of elements: parameter, offset in vector and flat buffer, size
        self._runs: list[tuple[int, int, int, int]] = []
        for number, fragment in enumerate(buffer.fragments):
            start = sum(sizes)
            if len(fragment.shape) == 2 and min(fragment.shape) >= min_dim_size_to_factor:
                rows, columns = fragment.shape
                self._names.append([ROWS, COLUMNS])
                self._starts |= {(number, ROWS): start, (number, COLUMNS): start + rows}
                sizes += [rows, columns]
                counts += [columns, rows]
                factored.append(number)
            else:
                self._names.append([ELEMENTS])
                sizes.append(torch.Size(fragment.shape).numel())
                counts.append(1)
                if fragment.size:
                    self._runs.append((number, start + fragment.start, fragment.offset, fragment.size))
        self._sizes, self._device = sizes, buffer.tensor.device
        self._lengths = torch.tensor(sizes, device=self._device)
        self._is_row = torch.tensor([part == ROWS for names in self._names for part in names], device=self._device)
        self._counts = torch.tensor(counts, device=self._device).repeat_interleave(
            self._lengths, output_size=sum(sizes)
        )
        self._vector = torch.zeros(sum(sizes), device=self._device)
        self._tiles = [
            (tile, self._index(tile, ROWS), self._index(tile, COLUMNS), tile.index(self._device))
            for tile in tiles(buffer, factored)
        ]

    def by_name(self) -> dict[str, dict[str, Tensor]]:
        pieces = iter(self._vector.split(self._sizes))
        return {
            fragment.name: dict(zip(names, itertools.islice(pieces, len(names)), strict=True))
            for fragment, names in zip(self._buffer.fragments, self._names, strict=True)
        }

    def sums(self, gradient: Tensor) -> Tensor:
        """This rank's sums of squares, laid out like the vector."""
        sums = torch.zeros_like(self._vector, dtype=torch.float64)
        for tile, rows, columns, _ in self._tiles:
            squares = tile.view(gradient).square()
            sums[rows] += squares.sum(dim=-1)
            sums[columns] += squares.sum(dim=-2)
        for _, start, offset, size in self._runs:
            sums.narrow(0, start, size).copy_(gradient.narrow(0, offset, size).square())
        return sums.float()

    def add(self, sums: Tensor, weight: Tensor, least: float) -> None:
        """Moves the moments towards the means of `sums`, those of all ranks, by `weight`."""
        self._vector.lerp_((sums / self._counts).add_(least), weight.to(self._vector.dtype))

    def scales(self) -> Tensor:
        """The factors of the gradient's elements for g / √V, laid out like the vector: those of a matrix by
        their row's and by their column's."""
        means = torch.segment_reduce(self._vector.double(), "mean", lengths=self._lengths, unsafe=True)
        roots = torch.where(self._is_row, means.sqrt(), 1.0).float()
        return self._vector.rsqrt().mul_(roots.repeat_interleave(self._lengths, output_size=len(self._vector)))

    def squares_of_update(self, gradient: Tensor, scales: Tensor) -> Tensor:
        """(parameters,) This rank's sums of squares of g / √V, fp64."""
        sums = torch.zeros(len(self._buffer.fragments), dtype=torch.float64, device=self._device)
        scaled = scales.square()
        for tile, rows, columns, numbers in self._tiles:
            row_sums = tile.view(gradient).square() @ scaled[columns].unsqueeze(-1)
            sums[numbers] += (row_sums.squeeze(-1) * scaled[rows]).sum(dim=-1, dtype=torch.float64)
        for number, start, offset, size in self._runs:
            update = gradient.narrow(0, offset, size) * scales.narrow(0, start, size)
            sums[number] += sum_of_squares(update)
        return sums

    def subtract(self, values: Tensor, gradient: Tensor, scales: Tensor, factors: Tensor) -> None:
        """Subtracts g / √V from `values`, each parameter's multiplied by its factor (parameters,)."""
        factors = factors.to(values.dtype)
        for tile, rows, columns, numbers in self._tiles:
            update = tile.view(gradient) * scales[columns].unsqueeze(-2)
            row_scales = scales[rows] * factors[numbers].unsqueeze(-1)
            tile.view(values).addcmul_(update, row_scales.unsqueeze(-1), value=-1)
        for number, start, offset, size in self._runs:
            update = gradient.narrow(0, offset, size) * factors[number]
            values.narrow(0, offset, size).addcmul_(update, scales.narrow(0, start, size), value=-1)

    def _index(self, tile: Tile, part: str) -> Any:
        """The indices in the vector of a tile's rows or columns."""
        lines = tile.rows if part == ROWS else tile.columns
        starts = [self._starts[number, part] for number in tile.numbers]
        if len(starts) == 1:
            return slice(starts[0] + lines.start, starts[0] + lines.stop)
        indices = torch.tensor(starts, device=self._device).view(*tile.lead, 1)
        return indices + torch.arange(lines.start, lines.stop, device=self._device)


ROWS, COLUMNS, ELEMENTS = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"
