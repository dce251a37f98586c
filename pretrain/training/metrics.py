"""The metrics of a log line: sums over the steps since the last one, and over the ranks."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pretrain.engine.ranks import all_gather
from pretrain.run.train_state import TrainState

Reduce = Literal["mean", "sum", "max"]
_METRICS = {"labels": "loss"}  # others by the names of their losses


class _Recorded(NamedTuple):
    """`total`: the sum of the `number` values of a metric, or the greatest value. A tensor stays on its device."""

    reduce: Reduce
    total: Tensor
    number: int

    def merged(self, name: str, other: "_Recorded") -> "_Recorded":
        if self.reduce != other.reduce:
            raise ValueError(f"the metric {name!r} is recorded with reduce={self.reduce!r} and {other.reduce!r}")
        total = torch.maximum(self.total, other.total) if self.reduce == "max" else self.total + other.total
        return _Recorded(self.reduce, total, self.number + other.number)


class Metrics:
    """The losses of the steps since the last log line, and the values that callbacks have recorded since then.

    Each rank has one. `record` may be called on any rank; all ranks call the other methods together.
    """

    def __init__(self) -> None:
        self._losses: dict[str, tuple[float, int]] = {}  # by name, its sum and the number of labels; of all ranks
        self._recorded: dict[str, _Recorded] = {}  # of this rank

    def record(self, name: str, value: float | Tensor, reduce: Reduce = "mean") -> None:
        """Records a value for the next log line, which has the mean, the sum or the maximum of all values of this name:
        of all steps since the last log line, and of all ranks.

        Some ranks may record more values than others, or none. A tensor, a scalar on any device, isn't waited for.
        Values that were recorded after the last log line aren't in checkpoints. Raises ValueError if `reduce` isn't
        what it was for the name before.
        """
        if reduce not in get_args(Reduce):
            raise ValueError(f"the metric {name!r}: reduce is one of {', '.join(get_args(Reduce))}, not {reduce!r}")
        new = _Recorded(reduce, torch.as_tensor(value, dtype=torch.float64).detach(), 1)
        before = self._recorded.get(name)
        self._recorded[name] = before.merged(name, new) if before else new

    def add_losses(self, losses: Mapping[str, tuple[float, int]]) -> None:
        """Adds the losses of a step: by name, the sum over the global batch and the number of labels."""
        for name, (added, labels) in losses.items():
            total, number = self._losses.get(name, (0.0, 0))
            self._losses[name] = total + added, number + labels

    @property
    def unlogged(self) -> dict[str, tuple[float, int]]:
        """The losses since the last log line, for a checkpoint."""
        return dict(self._losses)

    def restore(self, state: TrainState) -> None:
        """Continues from the losses in a checkpoint, without values that were recorded since."""
        self._losses, self._recorded = dict(state.unlogged), {}

    def take(self) -> dict[str, float]:
        """The metrics since the last call, the same on all ranks. Raises ValueError on all ranks if two of them have
        recorded a name with another `reduce`.

        train/loss: the mean per target token, in nats, over the steps that weren't skipped; NaN if all were.
        train/NAME: other losses by their names, a family's "embedding_loss" as the gradient includes it. All others by
        the names that they were recorded with.
        """
        losses, self._losses = self._losses or {"labels": (0.0, 0)}, {}
        recorded, self._recorded = self._recorded, {}
        found = {
            f"train/{_METRICS.get(name, name)}": total / number if number else math.nan
            for name, (total, number) in sorted(losses.items())
        }
        for name, one in sorted(_of_all_ranks(recorded).items()):
            found[name] = float(one.total) / one.number if one.reduce == "mean" else float(one.total)
        return found


def _of_all_ranks(recorded: Mapping[str, _Recorded]) -> dict[str, _Recorded]:
    """The values of all ranks, joined in the order of the ranks. All ranks call this together, each with its own names.

    The values are gathered, not reduced, since the ranks may have recorded other names.
    """
    own = {name: (one.reduce, float(one.total), one.number) for name, one in recorded.items()}
    joined: dict[str, _Recorded] = {}
    for of_rank in all_gather(own, dict[str, tuple[Reduce, float, int]]):
        for name, (reduce, total, number) in of_rank.items():
            one = _Recorded(reduce, torch.tensor(total, dtype=torch.float64), number)
            joined[name] = joined[name].merged(name, one) if name in joined else one
    return joined
