"""What all ways of running units share: how often a unit is tried, and what stands for one that was lost."""

from dataclasses import dataclass

RETRIES = 2  # for a unit whose worker was lost; Ray's default is infinite, but the unit itself may kill its workers
CAUSE = "it crashed, or the system ended it because memory ran out"


@dataclass(frozen=True)
class Lost:
    """Replaces a result if the worker was lost on every try. `reason` says how and where the last one was lost."""

    reason: str
