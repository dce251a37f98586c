"""Where units run: on a Ray cluster or, if their inputs are small, in this process."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config import RayConfig
from data_pipeline.foundation.errors import FailedError

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


def expect_units(config: RayConfig) -> None:
    """Begins to start a cluster of this machine in the background, if units will run on one."""
    global _start
    if _start is None and not _here and config.address is None:
        _start = _start_in_background(config.num_cpus)


@dataclass(frozen=True)
class Workers:
    """`number` workers, or this process itself (`here`).

    `each(function, inputs, what)` applies a function to each input and yields (name, result) as they finish, with
    an error for an input whose worker was lost on every try; `what` names the work in errors.
    """

    number: int
    here: bool
    each: Callable[[Callable[[str], str], Mapping[str, str], str], Iterator[tuple[str, str | FailedError]]]


def ready(corpus: Path, token: str, config: RayConfig) -> Workers:
    """The workers, which write to `corpus` as the build with `token`; waits until a cluster is up.

    Raises FailedError if a cluster is needed and can't be used.
    """
    expect_units(config)
    if _here:
        return Workers(1, True, _one_by_one)
    if _start is not None:
        _start.result()
        if threading.current_thread() is threading.main_thread():  # Ray itself does so if it is started there
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
    from data_pipeline.execution import ray_cluster  # Ray takes seconds to import

    if config.address is not None:
        ray_cluster.join(config.address, corpus, token)
    return Workers(ray_cluster.cpus(), False, ray_cluster.each)


def _one_by_one(
    function: Callable[[str], str], inputs: Mapping[str, str], what: str
) -> Iterator[tuple[str, str | FailedError]]:
    for name, text in inputs.items():
        yield name, function(text)


def _start_in_background(num_cpus: int | None) -> Future[None]:
    started: Future[None] = Future()

    def start() -> None:
        try:
            from data_pipeline.execution import ray_cluster  # Ray takes seconds to import

            ray_cluster.start(num_cpus)
            started.set_result(None)
        except Exception as error:
            started.set_exception(error)
        threading.Event().wait()  # for ever: the kernel ends Ray's processes with the thread that started them

    threading.Thread(target=start, name="ray", daemon=True).start()
    return started
