"""Units of work: planned on the driver, run by workers, committed one by one, and kept while their inputs stay.

A stage is a list of units, and on a cluster each unit is a Ray task. The worker writes the unit's files atomically and
returns only counts. The driver decides which units run; `workers` decides only where and when: the bytes are the same
for any number of workers, and a build that was killed resumes with the units that are missing. The unit's record, which
the driver writes last, commits it (`records`): it has the fingerprint of the unit's inputs, its files and its counts.
"""

import contextlib
import errno
import fnmatch
import socket
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, get_type_hints

from data_pipeline.execution import fitness, workers
from data_pipeline.execution.attempt import Failed, Needs
from data_pipeline.execution.config import RayConfig
from data_pipeline.execution.records import Records
from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.foundation.errors import FailedError, StoreError, UserError, WorkerDied, may_be_of_node, of_files
from data_pipeline.foundation.formatting import counted
from data_pipeline.foundation.store import Store

KEPT = "what is finished is kept"


@dataclass(frozen=True)
class Result:
    """What a unit's work returns: each stage that counts something has its own."""

    @property
    def files(self) -> list[str]:
        """The outputs that weren't known when the unit was planned."""
        return []


Spec = TypeVar("Spec")
ResultType = TypeVar("ResultType", bound=Result, covariant=True)


@dataclass(frozen=True)
class Unit(Generic[Spec]):
    """One piece of work. `spec` is the worker's argument; `inputs` fingerprints all that its result depends on.

    A spec's size must not grow with the number of units: long lists are passed as files (`merging.write_names`).

    `outputs` are the files it writes, relative to the corpus directory; its result adds those that aren't known
    beforehand. `bytes` is the size of its input, for the progress display. `size` is what its memory grows with: the
    bytes, if it isn't given.
    """

    name: str
    spec: Spec
    inputs: str
    outputs: tuple[str, ...] = ()
    bytes: int = 0
    size: int | None = None


@dataclass(frozen=True)
class Stage(Generic[Spec, ResultType]):
    """`work(corpus, spec)` writes the unit's outputs and returns its counts. `version` grows when their bytes change.

    Specs and results are dataclasses; their types are read from the annotations of `work`. `way_out` says which setting
    reduces a unit's memory. `memory`: the bytes that its work takes for each of the unit's `size`, beside the 0.3 GB of
    any worker; `cpus`: how many threads it has. `without(spec, file, reason)`, for specs of several files, is the spec
    without a `file` that has killed every worker that read it; `work` names each as its activity.
    """

    name: str
    version: int
    work: Callable[[Store, Spec], ResultType]
    way_out: str
    without: Callable[[Spec, str, str], Spec] | None = None
    memory: float = 0
    cpus: int = 1

    def fingerprint(self, unit: Unit[Spec]) -> str:
        return fingerprint([self.name, self.version, unit.inputs])

    def needs(self, unit: Unit[Spec]) -> Needs:
        return Needs(int(self.memory * (unit.bytes if unit.size is None else unit.size)), self.cpus)

    @property
    def finished(self) -> Any:
        """The type of its finished units."""
        return Finished[get_type_hints(self.work)["return"]]  # type: ignore[misc]


@dataclass(frozen=True)
class Output:
    """A file that a unit has written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Finished(Generic[ResultType]):
    """A committed unit: its counts, the sha256 of each output, and the core-seconds and seconds it took."""

    name: str
    fingerprint: str
    result: ResultType
    outputs: dict[str, Output]
    seconds: float
    wall_seconds: float

    @property
    def checksums(self) -> list[str]:
        return [output.sha256 for output in self.outputs.values()]


def outputs_of(units: Sequence[Finished[Result]]) -> dict[str, str]:
    """The sha256 of each file that `units` wrote, by name, in order."""
    return {name: output.sha256 for unit in units for name, output in unit.outputs.items()}


def keep_only(corpus: Store, folder: str, files: str, names: Collection[str]) -> None:
    """Removes what is below `folder`, fits the pattern `files` and isn't among `names`: an attempt under another
    config, or one whose records were damaged, may have written more."""
    found = fnmatch.filter(corpus.names(folder), f"*/{files}")
    corpus.delete(name for name in found if name not in names)


def run(
    stage: Stage[Spec, ResultType], units: list[Unit[Spec]], corpus: Store, ray_config: RayConfig, shown: bool = True
) -> list[Finished[ResultType]]:
    """Brings every unit of `stage` up to date and returns them in order; prints what is redone and why, if `shown`.

    A failed unit doesn't stop the others, unless a remote store failed it. At the end raises FailedError, with one line
    for each failure, or StoreError.
    """
    corpus.claim()  # first, since workers of a killed build may still be changing the corpus
    records = Records(corpus, stage.name)
    done: dict[str, Finished[ResultType]] = records.read(stage.finished)
    sizes = corpus.sizes(outputs_of([*done.values()]))
    reasons = {unit.name: _why_redo(done.get(unit.name), stage.fingerprint(unit), sizes) for unit in units}
    todo = [unit for unit in units if reasons[unit.name]]
    kept = len(units) - len(todo)
    if shown and units:
        because = ", ".join(sorted({reasons[unit.name] for unit in todo}))
        to_do = f"{counted(len(todo), 'unit')} to do ({because}), {kept}"
        print(f"{stage.name}:", to_do if todo else f"{kept} of {counted(kept, 'unit')}", "up to date", flush=True)
    if todo:
        records.remove({unit.name for unit in todo})
        finished, errors = dict[str, Finished[ResultType]](), list[Failed]()
        try:
            with records as record:
                finished, errors = _work_off(stage, todo, corpus, ray_config, record, shown)
        except StoreError as error:  # at the last lines
            errors.append(Failed(stage.name, error))
        done |= finished
        if errors:
            count = kept + len(finished) - len(records.waiting)
            _raise(errors, f"{stage.name}: {count} of {counted(len(units), 'unit')} done; the same command continues")
    if others := done.keys() - reasons.keys():  # no longer in the plan
        planned = outputs_of([done[unit.name] for unit in units])
        corpus.delete(outputs_of([done[name] for name in others]).keys() - planned.keys())
        records.remove(others)
    return [done[unit.name] for unit in units]


def _work_off(
    stage: Stage[Spec, ResultType],
    todo: list[Unit[Spec]],
    corpus: Store,
    ray_config: RayConfig,
    record: Callable[[Finished[ResultType]], None],
    bar: bool,
) -> tuple[dict[str, Finished[ResultType]], list[Failed]]:
    """Does the units `todo`, hands each to `record`, shows how far they are, and notes how long it took."""
    began, used = time.monotonic(), time.process_time()
    pool = workers.ready(ray_config)
    waited = time.monotonic() - began
    done: dict[str, Finished[ResultType]] = {}
    errors = []
    sizes = {unit.name: unit.bytes for unit in todo}
    try:
        for _, answer in pool.shown(_performed(stage, todo, corpus, pool), stage.name, sizes, bar):
            if isinstance(answer, Failed):
                pool.count("units_failed", stage.name)
                errors.append(answer)
                if isinstance(answer.error, StoreError):  # every other unit would wait for it too
                    break
            else:
                done[answer.name] = answer
                record(answer)
                pool.count("units_finished", stage.name)
                pool.count("bytes_written", stage.name, sum(output.bytes for output in answer.outputs.values()))
    except (FailedError, StoreError) as error:  # no worker is left, or `record` failed
        errors.append(Failed(stage.name, error))
    seconds, busy = time.monotonic() - began, sum(unit.wall_seconds for unit in done.values())
    driver = time.process_time() - used - (sum(unit.seconds for unit in done.values()) if pool.in_process else 0.0)
    idle = max(0.0, pool.number * (seconds - waited) - busy)
    times = [round(each, 1) for each in (idle, waited, driver)]
    with contextlib.suppress(StoreError):  # `errors` say more
        workers.Timing(round(seconds, 1), pool.number, *times).write(corpus, stage.name)
    return done, errors


def _why_redo(finished: Finished[Result] | None, expected: str, sizes: Mapping[str, int]) -> str:
    if finished is None:
        return "new"
    if finished.fingerprint != expected:
        return "input or config changed"
    if any(sizes.get(name) != output.bytes for name, output in finished.outputs.items()):
        return "output missing or cut"
    return ""


def read_finished(stage: Stage[Spec, ResultType], corpus: Store) -> list[Finished[ResultType]]:
    """The committed units of `stage` in a corpus, by name. Those whose record is damaged are left out."""
    return [*Records(corpus, stage.name).read(stage.finished).values()]


def _perform(
    stage: Stage[Spec, ResultType], unit: Unit[Spec], corpus: Store, token: str, versions: dict[str, str] | None
) -> Finished[ResultType] | Failed:
    """Runs in a worker: does the work; the driver commits it. `versions`: those of the driver, if this is another
    process."""
    began, used = time.monotonic(), time.process_time()
    try:
        if versions is not None:
            fitness.check(versions)
        with corpus.at_work(token):
            result = stage.work(corpus, unit.spec)
            outputs = {name: Output(*corpus.written(name)) for name in (*unit.outputs, *result.files)}
            core_seconds, seconds = round(time.process_time() - used, 3), round(time.monotonic() - began, 3)
            return Finished(unit.name, stage.fingerprint(unit), result, outputs, core_seconds, seconds)
    except UserError as error:
        return Failed(unit.name, error, may_be_of_node(error))
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return _out_of_memory(stage, unit.name, f"out of memory on {socket.gethostname()}")
        if failed := of_files(error, corpus.disk, KEPT):
            return Failed(unit.name, failed, of_node=True)
        return _bug(stage, unit, corpus, error)
    except MemoryError as error:
        reason = " ".join(f"out of memory on {socket.gethostname()}: {error}".split()).rstrip(": ")
        return _out_of_memory(stage, unit.name, reason)
    except Exception as error:
        return _bug(stage, unit, corpus, error)


def _out_of_memory(stage: Stage, unit: str, reason: str) -> Failed:
    way_out = f"{stage.way_out}, or use a machine with more memory"
    return Failed(unit, FailedError(f"{stage.name}: unit {unit}: {reason}; {way_out}; {KEPT}"))


def _bug(stage: Stage, unit: Unit, corpus: Store, error: Exception) -> Failed:
    """Saves the traceback of an unexpected error for a bug report, and names its file."""
    name = f".stages/failures/{stage.name}-{unit.name}.txt"
    with contextlib.suppress(OSError, StoreError):  # the disk may be what is wrong
        corpus.write(name, "".join(traceback.format_exception(error)).encode())
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    failed = FailedError(f"{stage.name}: unit {unit.name} failed: {reason} (traceback: {corpus.at(name)})")
    return Failed(unit.name, failed, may_be_of_node(error))


def _raise(errors: list[Failed], how_far: str) -> None:
    message = "\n".join(dict.fromkeys(str(failed.error) for failed in errors))
    if isinstance(last := errors[-1].error, StoreError):
        raise type(last)(f"{message}; {KEPT}\n{how_far}")
    message += f"\n{how_far}"
    user_error = max(failed.error.exit_code for failed in errors) == UserError.exit_code
    raise UserError(message) if user_error else FailedError(message)


def _performed(
    stage: Stage[Spec, ResultType], todo: list[Unit[Spec]], corpus: Store, pool: workers.Workers
) -> Iterator[tuple[str, Finished[ResultType] | Failed]]:
    token, versions = corpus.begin(), None if pool.in_process else fitness.versions()

    def perform(unit: Unit[Spec]) -> Finished[ResultType] | Failed:
        return _perform(stage, unit, corpus, token, versions)

    left = {unit.name: unit for unit in todo}
    while left:
        units, left = left, {}
        for name, answer in pool.each(perform, units, stage.name, stage.needs):
            if not isinstance(answer, FailedError):
                yield name, answer
                continue
            if isinstance(answer, WorkerDied) and stage.without and (file := answer.doing):
                spec = stage.without(units[name].spec, file, f"{answer}; {stage.way_out}")
                # with a fingerprint of its own, so that the next build tries the file again
                left[name] = replace(units[name], spec=spec, inputs=fingerprint([units[name].inputs, file]))
            else:
                yield name, _out_of_memory(stage, name, str(answer))
