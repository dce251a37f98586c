"""Adafactor (Shazeer and Stern 2018) as T5 was trained with it (Raffel et al. 2020, section 3.1.2)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from data_pipeline.base.errors import FailedError
from pretrain.config.optimizers.adafactor import AdafactorConfig
from pretrain.engine.optimizers.flat_buffers import (
    FlatBuffer,
    Sharded,
    fused_update,
    root_mean_squares,
    sum_of_squares,
    sums_of_squares,
)

# the paper's constants
_DECAY_RATE = 0.8
_OF_SQUARES, _LEAST_RMS = 1e-30, 1e-3  # ε₁ and ε₂
ROWS, COLUMNS, ELEMENTS = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"
_ELEMENTS_IN_CACHE = 1 << 19  # of a tile, 2 MB: with smaller tiles, calls of operations cost more than the cache saves


class Adafactor(Sharded):
    """Step t with gradient g, for each tensor p; all means are over the whole tensor (algorithms 4 and 5):

        V ← V + t^−0.8 · (g² + ε₁ − V); for a matrix, only the means of its rows R and of its columns C
        U = g / √V; for a matrix, V is approximated by R Cᵀ / mean(R)
        p ← (1 − rate · decay) p − rate · max(ε₂, RMS(p)) · U / max(1, RMS(U))

    Every rank holds the means of all tensors in its flat buffers, since they are small.
    """

    config: AdafactorConfig

    def __init__(self, groups: ParamsT, config: AdafactorConfig):
        super().__init__(groups, config)
        self._moments: dict[int, _SecondMoments] = {}

    def update(
        self, buffer: FlatBuffer, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any
    ) -> None:
        moments = self._moments_of(buffer)
        if not state:
            state["step"] = torch.zeros((), device=values.device)
        state["step"] += 1
        step = state["step"].double()
        squares = sums_of_squares(buffer, values)
        sums = self.summed(torch.cat([squares.float(), moments.sums(gradient)]))
        parameters = len(buffer.fragments)
        moments.add(sums[parameters:], step**-_DECAY_RATE, _OF_SQUARES)
        scales = moments.scales()
        factors = torch.full_like(squares, group["lr"])
        if self.config.multiply_by_parameter_scale:
            factors *= root_mean_squares(buffer, sums[:parameters].double()).clamp(min=_LEAST_RMS)
        sizes = root_mean_squares(buffer, self.summed(moments.squares_of_update(gradient, scales)))
        factors /= sizes.clamp(min=1.0)
        if group["weight_decay"]:
            values.mul_(1 - group["lr"] * group["weight_decay"])
        moments.subtract(values, gradient, scales, factors)

    def factored_state(self) -> dict[str, dict[str, Tensor]]:
        return {name: parts for moments in self._moments.values() for name, parts in moments.by_name().items()}

    def set_factored_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        if not state:  # of before the first step
            self._moments.clear()
            return
        for buffer in self._buffers.values():
            for name, parts in self._moments_of(buffer).by_name().items():
                found = state.get(name, {})
                for part, values in parts.items():
                    if part not in found or found[part].shape != values.shape:
                        raise FailedError(f"the checkpoint has no {part} of {name} in the shape {list(values.shape)}")
                    values.copy_(found[part])

    def _moments_of(self, buffer: FlatBuffer) -> "_SecondMoments":
        if id(buffer.tensor) not in self._moments:
            self._moments[id(buffer.tensor)] = _SecondMoments(buffer, self.config)
        return self._moments[id(buffer.tensor)]


@dataclass(frozen=True)
class Tile:
    """The same rows and columns of matrices of one shape, at `offset` in a flat buffer: a part of a matrix that fits a
    CPU's cache, or many matrices at once.

    `numbers`: the matrices, by their numbers among the buffer's parameters, repeats × `run`. The matrices of a run are
    contiguous; the runs begin `period` elements apart.
    """

    numbers: tuple[int, ...]
    offset: int
    rows: slice
    columns: slice
    run: int = 1
    period: int = 0

    def view(self, buffer: Tensor) -> Tensor:
        """(rows, columns) of one matrix, or (repeats, run, rows, columns): a view of `buffer`."""
        height, width = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        size, repeats = height * width, len(self.numbers) // self.run
        if len(self.numbers) == 1:
            return buffer.narrow(0, self.offset, size).view(height, width)
        offset = buffer.storage_offset() + self.offset
        return buffer.as_strided((repeats, self.run, height, width), (self.period, size, width, 1), offset)

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of `view`."""
        return () if len(self.numbers) == 1 else (len(self.numbers) // self.run, self.run)

    def index(self, device: torch.device) -> Any:
        """An index that selects the values of the matrices (*lead) from values of all parameters (parameters,)."""
        numbers = torch.tensor(self.numbers, device=device)
        return self.numbers[0] if len(self.numbers) == 1 else numbers.view(self.lead)


def tiles(buffer: FlatBuffer, numbers: list[int]) -> list[Tile]:
    """Tiles that cover this rank's fragments of the matrices with these `numbers` among the flat buffer's parameters.

    On a GPU, as few tiles as possible: the layers of a model repeat, so that all matrices of one kind are one tile.
    """
    if not fused_update(buffer.tensor.device):
        return [tile for number in numbers for tile in _parts(buffer, number, _ELEMENTS_IN_CACHE)]
    whole = [number for number in numbers if buffer.fragments[number].whole]
    split = [number for number in numbers if not buffer.fragments[number].whole]
    return [
        *_batches(buffer, whole),
        *(tile for number in split for tile in _parts(buffer, number, buffer.tensor.numel())),
    ]


def _parts(buffer: FlatBuffer, number: int, most: int) -> Iterator[Tile]:
    fragment, done = buffer.fragments[number], 0
    for rows, columns in fragment.rectangles():
        width = columns.stop - columns.start
        height = max(1, most // width)
        for first in range(rows.start, rows.stop, height):
            last = min(first + height, rows.stop)
            yield Tile((number,), fragment.offset + done, slice(first, last), columns)
            done += (last - first) * width


def _batches(buffer: FlatBuffer, numbers: list[int]) -> Iterator[Tile]:
    """Tiles of whole matrices: contiguous matrices of one shape make a run, equal runs at equal distances a tile."""
    runs: list[list[int]] = []
    for number in sorted(numbers, key=lambda number: buffer.fragments[number].offset):
        fragment = buffer.fragments[number]
        before = buffer.fragments[runs[-1][-1]] if runs else None
        if before and before.shape == fragment.shape and before.offset + before.size == fragment.offset:
            runs[-1].append(number)
        else:
            runs.append([number])
    by_shape: dict[tuple[tuple[int, ...], int], list[list[int]]] = {}
    for run in runs:
        by_shape.setdefault((buffer.fragments[run[0]].shape, len(run)), []).append(run)
    for (shape, length), group in by_shape.items():
        starts = [buffer.fragments[run[0]].offset for run in group]
        first = 0
        while first < len(group):
            last, period = first + 1, 0
            while last < len(group) and (last == first + 1 or starts[last] - starts[last - 1] == period):
                period = starts[last] - starts[last - 1]
                last += 1
            members = tuple(number for run in group[first:last] for number in run)
            yield Tile(members, starts[first], slice(0, shape[0]), slice(0, shape[1]), length, period)
            first = last


class _SecondMoments:
    """Second moments of a flat buffer's parameters, concatenated in one vector: the means of a matrix's rows and
    columns, or all elements of another parameter."""

    def __init__(self, buffer: FlatBuffer, config: AdafactorConfig):
        self._buffer = buffer
        self._names: list[list[str]] = []
        sizes: list[int] = []
        counts: list[int] = []  # of the elements of each mean
        factored: list[int] = []
        self._starts: dict[tuple[int, str], int] = {}  # by parameter and part: offset in the vector
        # of parameters that aren't factored: number, offsets in vector and flat buffer, size
        self._runs: list[tuple[int, int, int, int]] = []
        for number, fragment in enumerate(buffer.fragments):
            start = sum(sizes)
            if config.factors(fragment.shape):
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
        parts = iter(self._vector.split(self._sizes))
        return {
            fragment.name: dict(zip(names, itertools.islice(parts, len(names)), strict=True))
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
        """Moves the moments by `weight` towards the means of `sums`, which are over all ranks."""
        self._vector.lerp_((sums / self._counts).add_(least), weight.to(self._vector.dtype))

    def scales(self) -> Tensor:
        """The factors that turn g into g / √V, laid out like the vector. An element of a matrix is multiplied by the
        factors of its row and its column."""
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
