"""Has workers read and check files in groups. They write nothing, so nothing is recorded."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, chain
from typing import TypeVar

from data_pipeline.base.errors import FailedError, UserError, may_be_of_node, one_line
from data_pipeline.base.store import Store
from data_pipeline.engine import workers
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.context import Attempt, Failed, Needs
from data_pipeline.engine.records import Records
from data_pipeline.engine.work_units import Finished, Output, Result

Given = TypeVar("Given")
Answer = TypeVar("Answer")
_BYTES_AT_ONCE = 1 << 28  # of a unit


def read_all(
    work: Callable[[dict[str, Given], Attempt], Answer],
    files: Mapping[str, Given],
    size: Callable[[Given], int],
    what: str,
    ray_config: RayConfig,
) -> list[Answer]:
    """The answers of `work`, which gets groups of neighbouring `files`, in order. Runs where a build's units run.

    `work` also gets the attempt. `size` gives the bytes of a file; `what` names the work in messages. Raises what
    `work` raises, after another node has tried it, too.
    """
    groups, sizes = dict[str, dict[str, Given]](), Counter[str]()
    for name, end in zip(files, accumulate(map(size, files.values())), strict=True):
        group = str(end // _BYTES_AT_ONCE)
        groups.setdefault(group, {})[name] = files[name]
        sizes[group] += size(files[name])
    pool = workers.ready(ray_config)
    done: dict[str, Answer] = {}
    for name, answer in pool.shown(pool.each(partial(_answered, work), groups, what, lambda _: Needs()), what, sizes):
        if isinstance(answer, Failed | FailedError):
            raise answer.error if isinstance(answer, Failed) else answer
        done[name] = answer
    return [done[name] for name in groups]


def _answered(work: Callable[[Given, Attempt], Answer], given: Given, attempt: Attempt) -> Answer | Failed:
    try:
        return work(given, attempt)
    except (UserError, OSError) as error:
        failed = error if isinstance(error, UserError) else FailedError(one_line(error))
        return Failed(failed, may_be_of_node(error))


def forget_damaged(store: Store, ray_config: RayConfig) -> list[str]:
    """Removes the records of units with a damaged or missing file, so that `run` does these units again.

    Workers read every file of every stage. Returns the names of the damaged files.
    """
    token = store.begin()
    read = {name: Records(store, name).read(Finished[Result]) for name in store.folders(".stages")}
    stages = {name: units for name, units in sorted(read.items()) if units}  # other folders are no stages
    units_of = {
        name: (stage, unit.name, output)
        for stage, units in stages.items()
        for unit in units.values()
        for name, output in unit.outputs.items()
    }
    check = partial(_damaged, store, token)
    files = {name: output for name, (_, _, output) in units_of.items()}
    damaged = {*chain(*read_all(check, files, lambda output: output.bytes, "checking", ray_config))}
    for stage in stages:
        Records(store, stage).remove({units_of[name][1] for name in damaged if units_of[name][0] == stage})
    return [name for name in units_of if name in damaged]


def _damaged(store: Store, token: str, files: dict[str, Output], attempt: Attempt) -> list[str]:
    """The files whose content isn't what was written. Runs in a worker."""
    with store.at_work(token):
        return [name for name, output in files.items() if not _is_whole(store, name, output, attempt)]


def _is_whole(store: Store, name: str, output: Output, attempt: Attempt) -> bool:
    try:
        return store.checksum(name) == (output.bytes, output.sha256)
    except OSError as error:
        if attempt.may_be_retried(error):
            raise
        return False
