"""Runs the units of work of a stage: the driver plans them, workers do them, and the driver commits each.

A unit is a Ray task on a cluster. The worker writes the unit's files atomically and returns only counts. The driver
then writes the unit's record (`records`), with a fingerprint of the inputs, the files and the counts; this commits the
unit. Only units without a valid record run, so that a killed build resumes. `workers` decides where and when units run,
which doesn't change any byte.
"""

import contextlib
import errno
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Generic, TypeVar, get_type_hints

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import FailedError, StoreError, UserError, WorkerDied, may_be_of_node, of_files
from data_pipeline.base.formatting import counted, masked
from data_pipeline.base.store import Store
from data_pipeline.engine import fitness, workers
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.context import Attempt, Context, Failed, Needs
from data_pipeline.engine.records import Records

KEPT = "what is finished is kept"
_SAME_FAILURES = 20  # units that fail alike, one after the other, before the stage ends


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a unit's work. A stage that counts something has a subclass."""

    @property
    def files(self) -> list[str]:
        """The output files that weren't known when the unit was planned."""
        return []

    @property
    def again(self) -> list[str]:
        """The input files that couldn't be read and may be readable later. If there are any, the next build does the
        unit again."""
        return []


Spec = TypeVar("Spec")
ResultType = TypeVar("ResultType", bound=Result, covariant=True)


@dataclass(frozen=True, slots=True)
class Unit(Generic[Spec]):
    """A piece of work for a worker.

    Attributes:
        spec: the worker's argument. Its size must not grow with the number of units: long lists are passed as files
            (`merging.write_names`).
        inputs: a fingerprint of all that the result depends on.
        outputs: the files that it writes; `Result.files` adds those that aren't known beforehand.
        bytes: the size of the input, for the progress display.
        memory: the bytes that the work holds at most, beside the 0.3 GB of any worker.
    """

    name: str
    spec: Spec
    inputs: str
    outputs: tuple[str, ...] = ()
    bytes: int = 0
    memory: int = 0


@dataclass(frozen=True)
class Stage(Generic[Spec, ResultType]):
    """How the units of a stage are done. Specs and results are dataclasses.

    Attributes:
        version: grows when the bytes that `work` writes change.
        work: `work(context, spec)` writes the outputs of a unit and returns a Result, whose type is in its annotations.
        way_out: the setting that reduces a unit's memory.
        without: `without(spec, file, reason)` removes an input file from a spec after the file has crashed every worker
            that read it. `work` must call `context.file(file)`, so that the file is known.
        cpus: number of threads of `work`.
        keeps: the base class of the result that the driver keeps in memory; None: all. `recorded` reads the whole
            results.
    """

    name: str
    version: int
    work: Callable[[Context, Spec], ResultType]
    way_out: str
    without: Callable[[Spec, str, str], Spec] | None = None
    cpus: int = 1
    keeps: type[ResultType] | None = None

    def fingerprint(self, unit: Unit[Spec]) -> str:
        return fingerprint([self.name, self.version, unit.inputs])

    def needs(self, unit: Unit[Spec]) -> Needs:
        return Needs(unit.memory, self.cpus)

    @property
    def finished(self) -> Any:
        """The type of its finished units, as the driver keeps them."""
        return Finished[self.keeps or get_type_hints(self.work)["return"]]  # type: ignore[misc]

    def kept(self, unit: "Finished[ResultType]") -> "Finished[ResultType]":
        """What the driver keeps of a finished unit."""
        if not self.keeps:
            return unit
        kept = {one.name: getattr(unit.result, one.name) for one in fields(self.keeps)}
        return replace(unit, result=self.keeps(**kept))


@dataclass(frozen=True, slots=True)
class Output:
    """A file that a unit has written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
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
    """The sha256 of each file that `units` have written, by name, in order."""
    return {name: output.sha256 for unit in units for name, output in unit.outputs.items()}


def run(
    stage: Stage[Spec, ResultType], units: list[Unit[Spec]], store: Store, ray_config: RayConfig
) -> list[Finished[ResultType]]:
    """Brings all units of `stage` up to date; returns them in order. Prints what is done again and why.

    A failed unit doesn't stop the others, unless a remote store refuses or is away, or 20 units in a row fail alike, as
    with a bug. Raises FailedError or StoreError at the end, with one line for each failure.
    """
    store.claim()  # first: workers of a killed build may still be writing
    records = Records(store, stage.name)
    done: dict[str, Finished[ResultType]] = records.read(stage.finished)
    sizes = store.sizes(outputs_of([*done.values()]))
    reasons = {unit.name: _why_redo(done.get(unit.name), stage.fingerprint(unit), sizes) for unit in units}
    todo = [unit for unit in units if reasons[unit.name]]
    kept = len(units) - len(todo)
    if units:
        because = ", ".join(sorted({reasons[unit.name] for unit in todo}))
        to_do = f"{counted(len(todo), 'unit')} to do ({because}), {kept}"
        print(f"{stage.name}:", to_do if todo else f"{kept} of {counted(kept, 'unit')}", "up to date", flush=True)
    records.remove({unit.name for unit in todo})  # and damaged lines, even if nothing is to do
    if todo:
        finished, errors = dict[str, Finished[ResultType]](), list[UserError]()
        try:
            with records as record:
                finished, errors = _work_off(stage, todo, store, ray_config, record)
        except StoreError as error:  # the last records couldn't be written
            errors.append(error)
        done |= finished
        if errors:
            count = kept + len(finished) - len(records.waiting)
            _raise(errors, f"{stage.name}: {count} of {counted(len(units), 'unit')} done; the same command continues")
    if others := done.keys() - reasons.keys():  # no longer planned
        planned = outputs_of([done[unit.name] for unit in units])
        store.delete(outputs_of([done[name] for name in others]).keys() - planned.keys())
        records.remove(others)
    return [done[unit.name] for unit in units]


def _work_off(
    stage: Stage[Spec, ResultType],
    todo: list[Unit[Spec]],
    store: Store,
    ray_config: RayConfig,
    record: Callable[[Finished[ResultType]], None],
) -> tuple[dict[str, Finished[ResultType]], list[UserError]]:
    """Does the units `todo`, calls `record` with each and returns what is kept of each. Shows the progress, and records
    the times."""
    began, used = time.monotonic(), time.process_time()
    pool = workers.ready(ray_config)
    waited = time.monotonic() - began
    done: dict[str, Finished[ResultType]] = {}
    errors = list[UserError]()
    sizes = {unit.name: unit.bytes for unit in todo}
    alike, in_a_row = "", 0  # the last unit's failure without its name, and how many units in a row have failed so
    try:
        for name, answer in pool.shown(_performed(stage, todo, store, pool), stage.name, sizes):
            if isinstance(answer, Failed):
                errors.append(answer.error)
                failure = str(answer.error).replace(name, "")
                alike, in_a_row = failure, in_a_row + 1 if failure == alike else 1
                if isinstance(answer.error, StoreError):  # every other unit would wait for the store, too
                    break
                if in_a_row == _SAME_FAILURES:
                    kind = UserError if answer.error.exit_code == UserError.exit_code else FailedError
                    line = f"{answer.error}; the last {in_a_row} units failed alike, so the stage ends"
                    errors[-in_a_row:] = [kind(line)]
                    break
            else:
                alike, in_a_row = "", 0
                done[answer.name] = stage.kept(answer)
                record(answer)
    except (FailedError, StoreError) as error:  # no worker is left, or `record` failed
        errors.append(error)
    seconds, busy = time.monotonic() - began, sum(unit.wall_seconds for unit in done.values())
    driver = time.process_time() - used - (sum(unit.seconds for unit in done.values()) if pool.in_process else 0.0)
    idle = max(0.0, pool.number * (seconds - waited) - busy)
    times = [round(each, 1) for each in (idle, waited, driver)]
    with contextlib.suppress(StoreError):  # `errors` has the same already
        store.write_json(workers.timing_file(stage.name), workers.Timing(round(seconds, 1), pool.number, *times))
    return done, errors


def _why_redo(finished: Finished[Result] | None, expected: str, sizes: Mapping[str, int]) -> str:
    if finished is None:
        return "new"
    if finished.fingerprint != expected:
        return "files to read again" if finished.result.again else "input or config changed"
    if any(sizes.get(name) != output.bytes for name, output in finished.outputs.items()):
        return "output missing or cut"
    return ""


def read_finished(stage: Stage[Spec, ResultType], store: Store) -> list[Finished[ResultType]]:
    """The committed units of `stage`, in the order of their names. Damaged records are left out."""
    return [*Records(store, stage.name).read(stage.finished).values()]


def recorded(stage: Stage[Any, Any], kind: type[ResultType], store: Store) -> Iterator[Finished[ResultType]]:
    """The committed units of `stage` with their whole results, which are of `kind`, one at a time and in no order.

    Raises FailedError if a record is damaged.
    """
    return Records(store, stage.name).each(Finished[kind])  # type: ignore[valid-type]


def _perform(
    stage: Stage[Spec, ResultType],
    store: Store,
    token: str,
    versions: dict[str, str] | None,
    unit: Unit[Spec],
    attempt: Attempt,
) -> Finished[ResultType] | Failed:
    """Does a unit in a worker. `versions`: the driver's versions; None: this process is the driver."""
    began, used = time.monotonic(), time.process_time()
    try:
        if versions is not None:
            fitness.check(versions)
        with store.at_work(token):
            result = stage.work(Context(store, attempt, f"{token} {stage.name}"), unit.spec)
            outputs = {name: Output(*store.written(name)) for name in (*unit.outputs, *result.files)}
            core_seconds, seconds = round(time.process_time() - used, 3), round(time.monotonic() - began, 3)
            done = replace(unit, inputs=fingerprint([unit.inputs, *result.again])) if result.again else unit
            return Finished(unit.name, stage.fingerprint(done), result, outputs, core_seconds, seconds)
    except UserError as error:
        return Failed(error, may_be_of_node(error))
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return _out_of_memory(stage, unit.name, f"out of memory on {socket.gethostname()}")
        if failed := of_files(error, store.disk, KEPT):
            return Failed(failed, of_node=True)
        return _bug(stage, unit, store, error)
    except MemoryError as error:
        reason = " ".join(f"out of memory on {socket.gethostname()}: {error}".split()).rstrip(": ")
        return _out_of_memory(stage, unit.name, reason)
    except Exception as error:
        return _bug(stage, unit, store, error)


def _out_of_memory(stage: Stage, unit: str, reason: str) -> Failed:
    way_out = f"{stage.way_out}, or use a machine with more memory"
    return Failed(FailedError(f"{stage.name}: unit {unit}: {reason}; {way_out}; {KEPT}"))


def _bug(stage: Stage, unit: Unit, store: Store, error: Exception) -> Failed:
    """Saves the traceback of an unexpected error for a bug report, and names its file."""
    name = f".stages/failures/{stage.name}-{unit.name}.txt"
    with contextlib.suppress(OSError, StoreError):  # the disk itself may be at fault
        store.write(name, masked("".join(traceback.format_exception(error))).encode())
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    failed = FailedError(f"{stage.name}: unit {unit.name} failed: {reason} (traceback: {store.at(name)})")
    return Failed(failed, may_be_of_node(error))


def _raise(errors: list[UserError], how_far: str) -> None:
    message = "\n".join(dict.fromkeys(map(str, errors)))
    if isinstance(last := errors[-1], StoreError):
        raise type(last)(f"{message}; {KEPT}\n{how_far}")
    of_input = any(error.exit_code == UserError.exit_code for error in errors)
    raise (UserError if of_input else FailedError)(f"{message}\n{how_far}")


def _performed(
    stage: Stage[Spec, ResultType], todo: list[Unit[Spec]], store: Store, pool: workers.Workers
) -> Iterator[tuple[str, Finished[ResultType] | Failed]]:
    token, versions = store.begin(), None if pool.in_process else fitness.versions()
    perform = partial(_perform, stage, store, token, versions)
    left = {unit.name: unit for unit in todo}
    while left:
        units, left = left, {}
        for name, answer in pool.each(perform, units, stage.name, stage.needs):
            if not isinstance(answer, FailedError):
                yield name, answer
                continue
            if isinstance(answer, WorkerDied) and stage.without and (file := answer.file):
                spec = stage.without(units[name].spec, file, f"{answer}; {stage.way_out}")
                left[name] = replace(units[name], spec=spec)
            else:
                yield name, _out_of_memory(stage, name, str(answer))
