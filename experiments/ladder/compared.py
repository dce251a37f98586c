"""Two ladders side by side: how much more compute one recipe needs to reach the losses of the other."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from data_pipeline.base.errors import UserError
from data_pipeline.base.json_file import read_json
from experiments.ladder.scaling_law import Law, fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FARTHEST = 1e6  # times a rung's compute: where the search ends


@dataclass(frozen=True)
class Other:
    """A finished ladder: the FLOPs and mean losses of its rungs, and the law over FLOPs through them."""

    name: str
    flops: tuple[float, ...]
    losses: tuple[float, ...]
    law: Law

    @classmethod
    def read(cls, path: Path) -> "Other":
        """From a `ladder.json`. Raises UserError if it isn't one, or a rung has no loss yet."""
        try:
            saved = read_json(path, dict)
            rungs = [rung for rung in (*saved["rungs"], saved["next"]) if rung["losses"]]
            flops = tuple(float(rung["flops"]) for rung in rungs)
            losses = tuple(fmean(rung["losses"].values()) for rung in rungs)
            return cls(str(saved["name"]), flops, losses, fit(flops, losses))
        except FileNotFoundError:
            raise UserError(f"--against: {path}: no such file; a ladder writes its ladder.json") from None
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"--against: {path}: not the ladder.json of a finished ladder ({error})") from None

    def factor(self, flops: float, loss: float) -> tuple[float, float, float]:
        """How many times `flops` this ladder's recipe needs for `loss`, and the least and the most of it.

        The compute at which the law has this loss; and the range in which the loss lies within the law's 95 % interval
        (inverse prediction). It says nothing about the scatter of `loss`. Infinite where the law never comes so low.
        """
        multiples = [*map(float, np.geomspace(1 / _FARTHEST, _FARTHEST, 4001)), math.inf]
        best = next(i for i, one in enumerate(multiples) if one == math.inf or self.law(one * flops) <= loss)

        def inside(i: int) -> bool:
            low, high = self.law.interval(multiples[i] * flops)
            return low <= loss <= high

        # outwards from the best: far from all rungs the interval is so wide that it holds every loss
        least = most = best
        while least > 0 and inside(least - 1):
            least -= 1
        while most < len(multiples) - 1 and (most + 1 == len(multiples) - 1 or inside(most + 1)):
            most += 1
        return multiples[best], multiples[least], multiples[most]

    def words(self, rungs: Iterable[tuple[str, float, float]]) -> list[str]:
        """A sentence for each (name, FLOPs, loss) of the other recipe's rungs."""
        said = [
            f"Compute that {self.name} needs for the same loss, by its law, and the 95 % interval (degrees of freedom: "
            f"{self.law.degrees}):"
        ]
        for name, flops, loss in rungs:
            best, least, most = self.factor(flops, loss)
            beyond = ", beyond its largest rung" if best * flops > max(self.flops) else ""
            said.append(f"  {name}, {loss:.3f}: {best:.1f} times ({least:.1f} to {most:.1f}){beyond}")
        return said

    def draw(self, axes: "Axes", farthest: float) -> None:
        """Its rungs and its law, up to `farthest` FLOPs."""
        axes.plot(self.flops, self.losses, "o", color="C3")
        along = np.geomspace(min(self.flops), max(farthest, *self.flops), 100)
        axes.plot(along, [self.law(one) for one in along], color="C3", linewidth=1, label=f"law of {self.name}")
