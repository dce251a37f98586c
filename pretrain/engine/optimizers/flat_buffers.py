"""The flat fp32 tensors that an optimizer updates under ZeRO, and the fragments of parameters in them. `Sharded` is the
base of optimizers that need a whole parameter to update one of its elements."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from pretrain.config.optimizers.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Fragment:
    """Elements `start` … `start` + `size` − 1 of the flattened parameter `name`, at `offset` in the tensor `buffer`."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int
    buffer: Tensor
    offset: int

    @classmethod
    def inside(cls, name: str, shape: tuple[int, ...], place: int, buffer: Tensor) -> "Fragment":
        """The part of a parameter that is in `buffer`. `place`: offset of the parameter, which may be outside."""
        first, last = max(place, 0), min(place + torch.Size(shape).numel(), buffer.numel())
        if last <= first:
            return cls(name, shape, 0, 0, buffer, 0)
        return cls(name, shape, first - place, last - first, buffer, first)

    def view(self, buffer: Tensor) -> Tensor:
        """This fragment (size,) of a tensor laid out like `buffer`: the fp32 parameters or an optimizer state."""
        return buffer.narrow(0, self.offset, self.size)

    @property
    def whole(self) -> bool:
        """True if the fragment is the whole parameter."""
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

    There is a fragment for each parameter of the group, in the same order on every rank. A rank that holds none of the
    parameter has a fragment of size 0.
    """

    tensor: Tensor
    fragments: list[Fragment]

    @cached_property
    def sizes(self) -> Tensor:
        """(parameters,) The number of elements of each whole parameter."""
        sizes = [torch.Size(fragment.shape).numel() for fragment in self.fragments]
        return torch.tensor(sizes, device=self.tensor.device)

    def split(self, values: Tensor) -> list[Tensor]:
        """Splits `values`, laid out like the tensor, into one fragment (size,) per parameter."""
        return [fragment.view(values) for fragment in self.fragments]

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor]:
        """The number of the parameter, −1 for padding, and the length of each run of elements of one parameter."""
        runs, end = [], 0
        for number, fragment in enumerate(self.fragments):
            runs += [(-1, fragment.offset - end), (number, fragment.size)] if fragment.size else []
            end = fragment.offset + fragment.size if fragment.size else end
        runs.append((-1, self.tensor.numel() - end))
        numbers, lengths = torch.tensor(runs, device=self.tensor.device).unbind(dim=1)
        return numbers, lengths

    def spread(self, factors: Tensor) -> Tensor:
        """Each parameter's factor (parameters,) for each of its elements, laid out like the flat buffer; 0: padding."""
        numbers, lengths = self._runs
        padded = F.pad(factors.to(self.tensor.dtype), (0, 1))  # −1 is the last
        return padded[numbers].repeat_interleave(lengths, output_size=self.tensor.numel())


def fused_update(device: torch.device) -> bool:
    """True: update the whole flat buffer at once, which launches fewer kernels on a GPU. False, on a CPU: update it in
    parts that fit into the cache."""
    return device.type not in IN_PARTS


IN_PARTS = frozenset({"cpu"})  # types of devices
_ELEMENTS_OF_A_PART = 1 << 17  # that stays in the cache
_ELEMENTS_OF_A_NORM = 1 << 14  # in fp32 on a GPU: an fp64 norm would copy the flat buffer to fp64


def sum_of_squares(values: Tensor) -> Tensor:
    """() Sum over a flat buffer of any size, in fp64: in fp32, a norm of 25 million elements is off by 0.1 %."""
    if fused_update(values.device):
        rows = values.numel() // _ELEMENTS_OF_A_NORM
        whole, rest = values.split([rows * _ELEMENTS_OF_A_NORM, values.numel() - rows * _ELEMENTS_OF_A_NORM])
        norms = torch.linalg.vector_norm(whole.view(rows, _ELEMENTS_OF_A_NORM), dim=1)
        return torch.cat([norms, torch.linalg.vector_norm(rest)[None]]).double().square().sum()
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in values.split(_ELEMENTS_OF_A_PART)]
    return torch.stack(norms).square().sum()


class Sharded(Optimizer):
    """Updates ZeRO's flat tensors, which hold fragments of parameters, as if each rank held whole parameters.

    `attach` sets the layout. Without it, each parameter is a flat buffer with one whole fragment: the same code is the
    unsharded reference for sharded steps. A gradient of None counts as zeros, as under ZeRO, so that all ranks
    communicate in the same order.
    """

    def __init__(self, groups: ParamsT, config: OptimizerConfig):
        super().__init__(groups, {"lr": config.learning_rate, "weight_decay": config.weight_decay})
        self.config = config
        self._buffers: dict[int, FlatBuffer] = {}  # by id: ZeRO pickles flat tensors with all their attributes
        self._process_group: ProcessGroup | None = None
        self._device: torch.device | None = None

    def attach(
        self,
        flat_buffers: list[FlatBuffer],
        process_group: ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Makes `step` update `flat_buffers`. Without a process group, they hold whole parameters.

        `device`: the device on which the process group communicates, since flat buffers may be offloaded.
        """
        self._buffers = {id(buffer.tensor): buffer for buffer in flat_buffers}
        self._process_group, self._device = process_group, device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the current contents of `param_groups`: ZeRO calls this once for each flat buffer."""
        for group in self.param_groups:
            for number, tensor in enumerate(group["params"]):
                buffer = self._buffers.get(id(tensor)) or self._whole(tensor, group["param_names"][number])
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self.update(buffer, tensor.data.view(-1), gradient.reshape(-1), self.state[tensor], group)

    def update(
        self, buffer: FlatBuffer, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any
    ) -> None:
        """Updates the flat buffer's `values` (size,) from its `gradient` (size,).

        `state`: the buffer's state by name, as checkpoints store it: tensors (size,) and scalars. Empty before the
        first step.
        """
        raise NotImplementedError

    def factored_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer state in another shape than its parameter, by the names of parameter and state.

        The tensors are whole, and the same on every rank; don't modify them. Empty before the first step.
        """
        return {}

    def set_factored_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restores what `factored_state` returned, at any ZeRO stage and on any number of ranks."""

    def summed(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks."""
        if self._process_group is None:
            return values
        total = values.to(self._device)
        dist.all_reduce(total, group=self._process_group)
        return total.to(values.device)

    def _whole(self, parameter: Tensor, name: str) -> FlatBuffer:
        shape, size = tuple(parameter.shape), parameter.numel()
        buffer = FlatBuffer(parameter, [Fragment(name, shape, 0, size, parameter, 0)])
        return self._buffers.setdefault(id(parameter), buffer)


def sums_of_squares(buffer: FlatBuffer, values: Tensor) -> Tensor:
    """(parameters,) Sums over this rank's fragments, fp64."""
    fragments = buffer.split(values)
    if fused_update(values.device):
        return torch.stack(torch._foreach_norm(fragments, 2, torch.float64)).square()
    return torch.stack([sum_of_squares(fragment) for fragment in fragments])


def root_mean_squares(buffer: FlatBuffer, sums: Tensor) -> Tensor:
    """(parameters,) The RMS of each parameter, from sums of squares over whole parameters."""
    return (sums / buffer.sizes).sqrt()
