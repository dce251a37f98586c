"""Where units run: on a Ray cluster or, if their inputs are small, in this process; and where their time went."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from data_pipeline.config import RayConfig
from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.json_file import read_valid_json
from data_pipeline.foundation.lazy_imports import imported_at_first_use

with imported_at_first_use():
    from data_pipeline.execution import ray_cluster  # Ray takes 640 ms and 48 MB, and small builds do without

Given = TypeVar("Given")
Answer = TypeVar("Answer")
_in_process = False  # whether units run in this process


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """Within the block, units run one after the other in this process."""
    global _in_process
    before, _in_process = _in_process, True
    try:
        yield
    finally:
        _in_process = before


def are_small(size: int, config: RayConfig) -> bool:
    """Whether inputs of `size` bytes aren't worth the start of a cluster."""
    return config.address is None and size <= config.small_bytes


@dataclass(frozen=True)
class Workers:
    """`number` workers, or this process itself (`in_process`).

    `each(function, inputs, what)` applies a function to each input and yields (name, result) as they finish, with
    an error for an input whose worker was lost on every try; `what` names the work in errors.
    """

    number: int
    in_process: bool
    each: Callable[[Callable[[Any], Any], Mapping[str, Any], str], Iterator[tuple[str, Any]]]


def ready(corpus: Path, token: str, config: RayConfig) -> Workers:
    """The workers, which write to `corpus` as the build with `token`; starts or joins a cluster if that is needed.

    Raises FailedError if the cluster can't be used.
    """
    if _in_process:
        return Workers(1, True, _one_by_one)
    if config.address is None:
        ray_cluster.start(config.num_cpus)
    else:
        ray_cluster.join(config.address, corpus, token)
    return Workers(ray_cluster.cpus(), False, ray_cluster.each)


def _one_by_one(
    function: Callable[[Given], Answer], inputs: Mapping[str, Given], what: str
) -> Iterator[tuple[str, Answer | FailedError]]:
    for name, given in inputs.items():
        yield name, function(given)


@dataclass(frozen=True)
class Timing:
    """A stage's last run that had units to do, as its driver saw it: how long it took, and of that for a cluster to
    start.

    `idle_seconds`: the time of all workers without a unit, once the cluster was up. `driver_core_seconds`: the
    processor time of the driver.
    """

    seconds: float
    workers: int
    idle_seconds: float
    ray_start_seconds: float
    driver_core_seconds: float

    def write(self, corpus: Path, stage: str) -> None:
        write_json(_timing_file(corpus, stage), self)


def read_timing(corpus: Path, stage: str) -> Timing | None:
    """None if the stage has never had a unit to do."""
    return read_valid_json(_timing_file(corpus, stage), Timing)


def _timing_file(corpus: Path, stage: str) -> Path:
    return corpus / ".stages" / "timings" / f"{stage}.json"
