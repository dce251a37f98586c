"""Optimizers that need the whole tensor to update one of its elements."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from pretrain.config.optimizers import OptimizerConfig
from pretrain.optimizers.flat_buffers import FlatBuffer, Fragment, in_whole, sum_of_squares


class Sharded(Optimizer):
    """Updates ZeRO's flat tensors, which hold fragments of parameters, as if each rank held whole parameters.

    `attach` gives it the layout. Before that, each parameter is a flat buffer with one whole fragment: the same code is
    then the unsharded reference for sharded steps. A gradient of None counts as zeros, as it does under ZeRO, so that
    all ranks communicate in the same order.
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
        """Makes `step` update `flat_buffers`, which hold all of the parameters if there is no process group.

        `device`: where the process group communicates; flat buffers may be offloaded.
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

        `state` holds the buffer's state by name, as checkpoints store it: tensors (size,) and scalars. It is empty
        before the first step.
        """
        raise NotImplementedError

    def factored_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer state whose shape differs from its parameter's, by the names of parameter and state.

        Its tensors are whole and the same on every rank; don't modify them. Empty before the first step.
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
    pieces = buffer.pieces(values)
    if in_whole(values.device):
        return torch.stack(torch._foreach_norm(pieces, 2, torch.float64)).square()
    return torch.stack([sum_of_squares(piece) for piece in pieces])


def root_mean_squares(buffer: FlatBuffer, sums: Tensor) -> Tensor:
    """(parameters,) The RMS of each parameter, from sums of squares over whole parameters."""
    return (sums / buffer.sizes).sqrt()
