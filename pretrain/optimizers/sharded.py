"""Optimizers whose step of an element depends on the whole tensor that it is part of."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from pretrain.optimizers.config import OptimizerConfig
from pretrain.optimizers.flat import Flat, Fragment


class Sharded(Optimizer):
    """Steps flat tensors that hold fragments of parameters, as ZeRO cuts them, as if they were whole.

    `attach` says what lies where. Until then each parameter is a flat of one whole fragment: the same code is the
    unsharded optimizer that sharded steps are measured against. A gradient that is None counts as zeros, as it does
    under ZeRO, so that all ranks communicate in the same order.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig):
        super().__init__(groups, {"lr": config.learning_rate, "weight_decay": config.weight_decay})
        self._flats: dict[int, Flat] = {}  # by id: ZeRO pickles flat tensors with all that hangs on them
        self._process_group: ProcessGroup | None = None
        self._device: torch.device | None = None

    def attach(self, flats: list[Flat], process_group: ProcessGroup, device: torch.device) -> None:
        """From now on steps `flats`. `device`: where the process group communicates; offloaded flats lie elsewhere."""
        self._flats = {id(flat.tensor): flat for flat in flats}
        self._process_group, self._device = process_group, device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of what `param_groups` hold just now: ZeRO calls it for each flat by itself."""
        for group in self.param_groups:
            for number, tensor in enumerate(group["params"]):
                flat = self._flats.get(id(tensor)) or self._whole(tensor, group["param_names"][number])
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self.update(flat, tensor.data.view(-1), gradient.reshape(-1), self.state[tensor], group)

    def update(self, flat: Flat, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any) -> None:
        """Steps `values` (size,) of the flat by its `gradient` (size,). `state` is the flat's: tensors (size,) and
        scalars, none before the first step, which are in checkpoints by name."""
        raise NotImplementedError

    def factored_state(self) -> dict[str, dict[str, Tensor]]:
        """State of other shapes than the parameters', see `pretrain.zero.optimizer.factored_state`."""
        return {}

    def set_factored_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Puts back what `factored_state` gave."""

    def summed(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks."""
        if self._process_group is None:
            return values
        total = values.to(self._device)
        dist.all_reduce(total, group=self._process_group)
        return total.to(values.device)

    def _whole(self, parameter: Tensor, name: str) -> Flat:
        shape, size = tuple(parameter.shape), parameter.numel()
        flat = Flat(parameter, [Fragment(name, shape, 0, size, parameter, 0)])
        return self._flats.setdefault(id(parameter), flat)


def sums_of_squares(flat: Flat, values: Tensor) -> Tensor:
    """(parameters,) fp64, of this rank's fragments: in fp32 a norm of 25 million elements is off by a thousandth."""
    return torch.stack(torch._foreach_norm(flat.pieces(values), 2, torch.float64)).square()


def root_mean_squares(flat: Flat, sums: Tensor) -> Tensor:
    """(parameters,) from the sums of squares over whole parameters."""
    return (sums / flat.sizes).sqrt()


def subtract(flat: Flat, values: Tensor, update: Tensor, factors: Tensor) -> None:
    """Subtracts `update` (size,) from `values` (size,), each parameter's times its factor (parameters,)."""
    pieces = flat.pieces(update)
    torch._foreach_mul_(pieces, list(factors.to(update.dtype).unbind()))
    torch._foreach_sub_(flat.pieces(values), pieces)
