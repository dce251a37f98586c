"""The two checks of muP: coordinates, and the transfer of the best learning rate (Yang et al. 2021, section 4, D.1)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from experiments.mup.trial import LOGITS, Trial
from experiments.mup.widths import Subject
from pretrain.config.optimizers import OptimizerConfig

STEPS = 5  # of the coordinate check
STEPS_OF_TRANSFER, SEEDS = 16, (0, 1)
_LAST = 4  # of these steps' losses the mean is taken
_MOST_BEYOND = 4  # doublings of the rate on each side of the five that are always tried
PASSES, WARNS = 2.0, 5.0  # the largest activation over the smallest
CHANGE = 0.4  # how far a step's change may be from its power of the width
TRANSFERS, TRANSFERS_BADLY = 2.0, 4.0  # the largest best rate over the smallest


@dataclass(frozen=True)
class Coordinates:
    """What one parametrisation does at each width, by kind: root mean squares of activations before training and after
    some steps, and of the change of weights in the first step. For logits `after` is how far those of the targets have
    risen above the mean over the vocabulary.

    The root mean square of the change of all logits wouldn't do. The hidden states move along the targets' rows of the
    output matrix, by as much at every width; the logits of all other ids move by a random sum, which falls as m^-½
    like the logits at the start, and which outweighs the few targets until the width exceeds the vocabulary.
    """

    start: Mapping[str, Mapping[int, float]]
    after: Mapping[str, Mapping[int, float]]
    change: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Verdict:
    """One line of the result. `ratio`: the largest value over the smallest, or how far a change is off."""

    what: str
    ratio: float
    verdict: str

    @classmethod
    def from_ratio(cls, what: str, values: Sequence[float], passes: float, warns: float) -> "Verdict":
        """`passes`, `warns` or `fails`. Values that aren't finite fail, and so does zero beside others."""
        least = min(values)
        valid = all(map(math.isfinite, values)) and least > 0
        ratio = max(values) / least if valid else math.inf
        return cls(what, ratio, "passes" if ratio <= passes else "warns" if ratio <= warns else "fails")


def coordinates(subject: Subject, optimizer: OptimizerConfig, widths: Sequence[int], mup: bool) -> Coordinates:
    """Trains for some steps at each of `widths`; all of them see the same rows."""
    start: dict[str, dict[int, float]] = {}
    after: dict[str, dict[int, float]] = {}
    change: dict[str, dict[int, float]] = {}
    for width in widths:
        trial = Trial(subject.at(width, mup), optimizer, seed=0)
        first = subject.batches[0]
        before, target_lift = trial.activations(first)
        weights = trial.weights()
        for step in range(STEPS):
            trial.step(subject.batches[step])
            if step == 0:
                changes = trial.changes(weights)
        ended, target_lift_then = trial.activations(first)
        ended[LOGITS] = target_lift_then - target_lift
        for into, found in ((start, before), (after, ended), (change, changes)):
            for kind, value in found.items():
                into.setdefault(kind, {})[width] = value
    return Coordinates(start, after, change)


def judged(found: Coordinates, subject: Subject, optimizer: OptimizerConfig) -> list[Verdict]:
    """The verdicts on muP's coordinates. Logits at the start fall with the width by design, so they don't count."""
    verdicts = [
        Verdict.from_ratio(f"{kind}, {when}", list(by_width.values()), PASSES, WARNS)
        for when, values in (("start", found.start), (f"after {STEPS} steps", found.after))
        for kind, by_width in values.items()
        if (kind, when) != (LOGITS, "start")
    ]
    for kind, by_width in found.change.items():
        exponent = optimizer.change_exponent("matrices") if kind == "matrices" else 0.0
        scaled = [value * (width / subject.base_width) ** exponent for width, value in by_width.items()]
        middle = math.exp(sum(math.log(max(value, 1e-300)) for value in scaled) / len(scaled))
        off = max(abs(value / middle - 1) for value in scaled)
        power = {0.0: "flat", 0.5: "∝ m^-½", 1.0: "∝ 1/m"}[exponent]
        verdicts.append(Verdict(f"first change of {kind}, {power}", off, "passes" if off <= CHANGE else "fails"))
    return verdicts


@dataclass
class Transfer:
    """Losses at the end of short trainings, by width and the power of two that the run's rate is multiplied by."""

    losses: dict[int, dict[int, float]] = field(default_factory=dict)

    def best(self, width: int) -> float:
        """The factor of the rate with the lowest loss: the vertex of the parabola, over the rate's logarithm, through
        the best rate and its neighbours."""
        losses = {power: loss for power, loss in self.losses[width].items() if math.isfinite(loss)}
        if not losses:
            return math.nan
        lowest = min(losses, key=lambda power: losses[power])
        below, above = losses.get(lowest - 1), losses.get(lowest + 1)
        if below is None or above is None:
            return 2.0**lowest
        curvature = below - 2 * losses[lowest] + above
        return 2.0 ** (lowest + (0.5 * (below - above) / curvature if curvature > 0 else 0.0))

    def verdict(self) -> Verdict:
        best = [self.best(width) for width in self.losses]
        return Verdict.from_ratio("best learning rate over widths", best, TRANSFERS, TRANSFERS_BADLY)


def transfer(subject: Subject, optimizer: OptimizerConfig, widths: Sequence[int], mup: bool = True) -> Transfer:
    """Trains at three widths with five rates and two seeds, and with more rates where the best is at the edge."""
    found = Transfer()
    for width in widths:
        losses = found.losses[width] = {power: _loss(subject, optimizer, width, power, mup) for power in range(-2, 3)}
        for _ in range(_MOST_BEYOND):
            lowest = min(losses, key=lambda power: (not math.isfinite(losses[power]), losses[power]))
            beyond = lowest + 1 if lowest == max(losses) else lowest - 1
            if beyond in losses:
                break
            losses[beyond] = _loss(subject, optimizer, width, beyond, mup)
    return found


def _loss(subject: Subject, optimizer: OptimizerConfig, width: int, power: int, mup: bool) -> float:
    """The mean over seeds and the last steps; inf if it isn't finite."""
    losses = []
    for seed in SEEDS:
        trial = Trial(subject.at(width, mup), optimizer, seed, rate=2.0**power)
        step_losses = [trial.step(batch) for batch in subject.batches[:STEPS_OF_TRANSFER]]
        losses.append(sum(step_losses[-_LAST:]) / _LAST)
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf
