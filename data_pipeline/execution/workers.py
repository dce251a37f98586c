"""Where units run: on a Ray cluster, in a child process if there is only one, or in this process if they are small."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from data_pipeline.config import RayConfig
from data_pipeline.execution import child_process, ownership, ray_environment
from data_pipeline.execution.attempts import Lost

_here = False  # whether units run in this process
_start: Future[None] | None = None  # of the cluster of this machine, which is then there for all stages


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """Within the block, units run one after the other in this process."""
    global _here
    before, _here = _here, True
    try:
        yield
    finally:
        _here = before


def for_inputs(size: int, config: RayConfig) -> contextlib.AbstractContextManager[None]:
    """`without_ray` for a build whose inputs have `size` bytes, if they are small."""
    return without_ray() if are_small(size, config) else contextlib.nullcontext()


def are_small(size: int, config: RayConfig) -> bool:
    """Whether inputs of `size` bytes aren't worth the start of a cluster."""
    return config.address is None and size <= config.small_bytes


def expect(units: int, config: RayConfig) -> None:
    """Begins to start a cluster of this machine in the background, if `units` units will need it."""
    global _start
    if _start is None and not _here and config.address is None and units > 1:
        ray_environment.prepare()
        _start = ThreadPoolExecutor(1, "ray").submit(_start_here, config)


def each(
    function: Callable[[str], str], inputs: Mapping[str, str], what: str, corpus: Path, token: str, config: RayConfig
) -> Iterator[tuple[str, str | Lost]]:
    """Applies `function` to each of `inputs`; yields (name, result) as they finish.

    `function` writes to `corpus`, as the build with `token`; `what` names the work in errors. Raises FailedError if a
    cluster is needed and can't be used.
    """
    expect(len(inputs), config)
    if _here:
        yield from ((name, function(text)) for name, text in inputs.items())
    elif _start is None and config.address is None:
        yield from ((name, child_process.apply(_in_child(function), text)) for name, text in inputs.items())
    else:
        if _start is not None:
            _start.result()
        ray_environment.prepare()
        from data_pipeline.execution import ray_cluster  # Ray takes seconds to import

        if config.address is not None:
            ray_cluster.join(config.address, corpus, token)
        yield from ray_cluster.each(function, inputs, what)


def _in_child(function: Callable[[str], str]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        ownership.leave()
        return function(text)

    return apply


def _start_here(config: RayConfig) -> None:
    from data_pipeline.execution import ray_cluster

    ray_cluster.start(config.num_cpus)
