"""Detects ranks that use different parameters in a step, as with stochastic depth or experts that each rank chooses.

Where DeepSpeed reduces gradients, the ranks meet in the backward pass at each parameter, and at ZeRO stage 3 also in
the forward pass at each module. Ranks that use different parameters would then add gradients of one parameter to
another's, fail in a collective, or wait for ever.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import first_few
from data_pipeline.loading.prefetch import to_device
from pretrain.engine.ranks import all_gather

_MOST_NAMED = 3
_LEAF = "torch::autograd::AccumulateGrad"


class SameUse:
    """Compares the parameters that the ranks use. All ranks call its methods together, and each raises UserError.

    Until the first step has ended, the ranks exchange what they are about to use before they meet there. In later
    steps, they compare what each has used once the step has ended.
    """

    def __init__(self, model: nn.Module, gathered: Sequence[nn.Module], ranks: int, remedy: str):
        """`gathered`: the modules whose weights the ranks gather together. `ranks`: the number of ranks. `remedy`: what
        the user can do."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._ranks, self._remedy = ranks, remedy
        self._used: set[str] = set()  # in the backward passes of this step
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))
        names = {id(module): name for name, module in model.named_modules()}
        # DeepSpeed's hooks, which gather the weights, come after these
        self._hooks = [
            module.register_forward_pre_hook(partial(self._meet, names[id(module)]), prepend=True)
            for module in gathered
        ]
        if gathered:
            self._hooks.append(model.register_forward_hook(partial(self._meet, "")))  # no module follows
        self._first_step = True

    def _note(self, name: str, _: Tensor) -> None:
        self._used.add(name)

    def _meet(self, name: str, *_: object) -> None:
        if len(names := set(all_gather(name, str))) > 1:
            self._refuse(sorted(names - {""}))

    def compare(self, loss: Tensor) -> None:
        """Called before the backward pass of a micro-batch's `loss`."""
        if self._first_step:
            own = {self._names[leaf] for leaf in _leaves(loss) if leaf in self._names}
            of_each = [set(names) for names in all_gather(sorted(own), list[str])]
            if different := set[str]().union(*of_each) - of_each[0].intersection(*of_each):
                self._refuse([name for name in self._names.values() if name in different])

    def taken(self, device: torch.device) -> dict[str, Tensor]:
        """For each parameter by name, () fp64 on `device`: 1 if this rank has used it in the step that now ends, or
        else 0."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._first_step = [], False
        used, self._used = self._used, set()
        names = list(self._names.values())
        flags = to_device([float(name in used) for name in names], device, torch.float64)
        return dict(zip(names, flags.unbind(), strict=True))

    def check(self, ranks: dict[str, float]) -> None:
        """Called after the step. `ranks`: how many ranks have used each parameter."""
        if different := [name for name, number in ranks.items() if 0 < number < self._ranks]:
            self._refuse(different)

    def _refuse(self, names: list[str]) -> None:
        raise UserError(
            f"model: the ranks use different parameters in a step ({first_few(names, _MOST_NAMED)}), {self._remedy}"
        )


def _leaves(loss: Tensor) -> set[int]:
    """The tensors that a backward pass of `loss` gives gradients, by their ids."""
    found, seen = set[int](), set[object]()
    waiting: list[Any] = [loss.grad_fn]  # PyTorch's stubs lack a leaf's `variable`
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == _LEAF:
            found.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return found
