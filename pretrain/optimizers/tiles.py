"""Rectangles of matrices in a flat buffer, as views: small ones that fit a CPU's cache, or many matrices at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.optimizers.flat_buffers import FlatBuffer, in_whole

_ELEMENTS_IN_CACHE = 1 << 19  # of a tile, 2 MB; in smaller ones calls of operations take more than the cache saves


@dataclass(frozen=True)
class Tile:
    """The same rows and columns of matrices of one shape, at `offset` in a flat buffer.

    `numbers`: the matrices, by their numbers among the buffer's parameters: `repeats` × `run`. Those of a run are
    contiguous; the runs lie at a distance of `period`.
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
        """An index that gives those of the matrices (*lead) from values of all parameters (parameters,)."""
        numbers = torch.tensor(self.numbers, device=device)
        return self.numbers[0] if len(self.numbers) == 1 else numbers.view(self.lead)


def tiles(buffer: FlatBuffer, numbers: list[int]) -> list[Tile]:
    """Tiles that cover what this rank holds of the matrices with these `numbers` among the flat buffer's parameters.

    On a GPU as few as possible: the layers of a model repeat, so that all matrices of one kind are one tile.
    """
    if not in_whole(buffer.tensor.device):
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
    """Whole matrices, grouped: contiguous ones of one shape make a run, equal runs at one distance a tile."""
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
