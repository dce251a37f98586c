"""The flat fp32 tensors that an optimizer updates under ZeRO, and the fragments of parameters in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """Elements `start` … `start` + `size` − 1 of the flattened parameter `name`, at `offset` in the tensor `buffer`."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int
    buffer: Tensor
    offset: int

    def view(self, buffer: Tensor) -> Tensor:
        """This fragment (size,) of a tensor laid out like `buffer`: the fp32 parameters or an optimizer state."""
        return buffer.narrow(0, self.offset, self.size)

    @property
    def whole(self) -> bool:
        """True if it is the whole parameter."""
        return self.size == torch.Size(self.shape).numel()

    def rectangles(self) -> Iterator[tuple[slice, slice]]:
        """The rows and columns of the fragment of a matrix, as at most three rectangles, in the order of its elements.

        Elements 2 … 8 of a matrix (4, 3) → [0:1, 2:3], [1:3, 0:3]
        """
        width, done = self.shape[1], 0
        while done < self.size:
            row, column = divmod(self.start + done, width)
            left = self.size - done
            whole = column == 0 and left >= width
            rows, columns = (left // width, width) if whole else (1, min(left, width - column))
            yield slice(row, row + rows), slice(column, column + columns)
            done += rows * columns


@dataclass(frozen=True)
class FlatBuffer:
    """A tensor that an optimizer updates, and the fragments of parameters in it.

    There is one fragment for each parameter of the group, in the same order on every rank. Its size is 0 on a rank that
    holds none of the parameter.
    """

    tensor: Tensor
    fragments: list[Fragment]

    @cached_property
    def sizes(self) -> Tensor:
        """(parameters,) The number of elements of each whole parameter."""
        sizes = [torch.Size(fragment.shape).numel() for fragment in self.fragments]
        return torch.tensor(sizes, device=self.tensor.device)

    def pieces(self, values: Tensor) -> list[Tensor]:
        """Splits `values`, laid out like the tensor, into one piece (size,) per parameter."""
        return [fragment.view(values) for fragment in self.fragments]

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor]:
        """The parameter and the length of each run of elements that belong to one; padding belongs to none, −1."""
        runs, end = [], 0
        for number, fragment in enumerate(self.fragments):
            runs += [(-1, fragment.offset - end), (number, fragment.size)] if fragment.size else []
            end = fragment.offset + fragment.size if fragment.size else end
        runs.append((-1, self.tensor.numel() - end))
        numbers, lengths = torch.tensor(runs, device=self.tensor.device).unbind(dim=1)
        return numbers, lengths

    def spread(self, factors: Tensor) -> Tensor:
        """The factor (parameters,) of each element's parameter, laid out like the flat buffer; 0 for padding."""
        numbers, lengths = self._runs
        padded = F.pad(factors.to(self.tensor.dtype), (0, 1))  # −1 is the last
        return padded[numbers].repeat_interleave(lengths, output_size=self.tensor.numel())


def in_whole(device: torch.device) -> bool:
    """True if optimizers update a whole flat buffer in few operations: on a GPU each operation costs a launch. On a
    CPU, many operations on parts that stay in the cache are faster."""
    return device.type not in IN_PARTS


IN_PARTS = frozenset({"cpu"})  # types of devices
_ELEMENTS_OF_A_PART = 1 << 17  # what stays in the cache


def sum_of_squares(values: Tensor) -> Tensor:
    """() Over a flat buffer of any size, fp64: in fp32, a norm of 25 million elements is off by 0.1%."""
    if in_whole(values.device):
        return torch.linalg.vector_norm(values, dtype=torch.float64).square()
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in values.split(_ELEMENTS_OF_A_PART)]
    return torch.stack(norms).square().sum()
