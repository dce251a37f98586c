"""What a run has trained on, from the lines that its attempts wrote, and how a killed run differs from another."""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """A line of `record.Record`. `time`: in seconds since 1970."""

    step: int
    rows: tuple[int | str, ...]
    loss: float
    time: float


@dataclass(frozen=True)
class Kill:
    """`delay`: seconds after the line of `step`."""

    step: int
    delay: float


@dataclass(frozen=True)
class Difference:
    """`lost`: rows that only the undisturbed run has trained on. `twice`: rows that the killed run has trained on more
    often than the undisturbed run, and more than once. `loss`: the largest difference of a step's loss, infinite if a
    step is missing. `losses`: by step, those differences."""

    lost: int
    twice: int
    loss: float
    losses: Mapping[int, float]


def read(path: Path, after: int = 0) -> list[Step]:
    """The lines of all attempts, in order, but for the first `after` bytes and lines within which an attempt was
    killed."""
    if not path.exists():
        return []
    steps = []
    for line in path.read_bytes()[after:].splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        steps.append(Step(one["step"], tuple(one["rows"]), one["loss"], one["time"]))
    return steps


def effective(lines: Sequence[Step]) -> dict[int, Step]:
    """The steps that made the final weights, by number: of a step that was taken again, the last line."""
    return {line.step: line for line in lines}


def compare(undisturbed: Sequence[Step], killed: Sequence[Step]) -> Difference:
    wanted, found = effective(undisturbed), effective(killed)
    once = Counter(row for step in wanted.values() for row in step.rows)
    again = Counter(row for step in found.values() for row in step.rows)
    losses = {step: abs(found[step].loss - wanted[step].loss) for step in wanted.keys() & found.keys()}
    return Difference(
        lost=len(once.keys() - again.keys()),
        twice=sum(number > max(1, once[row]) for row, number in again.items()),
        loss=max(losses.values(), default=0.0) if wanted.keys() == found.keys() else float("inf"),
        losses=dict(sorted(losses.items())),
    )


def moments(undisturbed: Sequence[Step], kills: int, seed: int) -> list[Kill]:
    """Moments of the undisturbed run's training, each as likely as any other, in the order of the steps."""
    draw = random.Random(seed)
    drawn = sorted(draw.uniform(undisturbed[0].time, undisturbed[-1].time) for _ in range(kills))
    found = []
    for moment in drawn:
        before = next(one for one, after in pairwise(undisturbed) if moment <= after.time)
        found.append(Kill(before.step, moment - before.time))
    return found
