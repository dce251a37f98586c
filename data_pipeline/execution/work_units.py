"""Units of work: planned on the driver, run on Ray Data, committed one by one, and kept while their inputs stay.

A stage is a list of units, and each unit is one Ray row. The worker writes the unit's files atomically and returns only
counts. The driver decides which units run; Ray decides only when. The unit's sidecar, `CORPUS/.stages/STAGE/UNIT.json`,
is written last and commits it: it has the fingerprint of the unit's inputs, its files and its counts.
"""

import errno
import json
import os
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from data_pipeline.config import RayConfig
from data_pipeline.execution import ownership
from data_pipeline.foundation import progress
from data_pipeline.foundation.atomic import fingerprint, sha256, write_bytes, write_json
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.progress import counted, track

Json = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """One piece of work. `spec` is the worker's argument, as JSON; `inputs` fingerprints all its result depends on.

    A spec's size must not grow with the number of units: long lists are passed as files (`name_lists`).

    `outputs` are the files it writes, relative to the corpus directory. A unit that doesn't know them beforehand lists
    them as `parts` in its result. `bytes` is the size of its input, for the progress display.
    """

    name: str
    spec: Json
    inputs: str
    outputs: tuple[str, ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Stage:
    """`work(corpus, spec)` writes the unit's outputs and returns its counts. `version` grows when their bytes change.

    `way_out` says which setting of the corpus file reduces a unit's memory.
    """

    name: str
    version: int
    work: Callable[[Path, Json], Json]
    way_out: str


@dataclass(frozen=True)
class Finished:
    """A committed unit: its counts, the sha256 of each output, and the core-seconds it took."""

    name: str
    fingerprint: str
    result: Json
    outputs: dict[str, Json]
    seconds: float

    @property
    def checksums(self) -> list[str]:
        return [output["sha256"] for output in self.outputs.values()]


_FINISHED = TypeAdapter(Finished)


def run(stage: Stage, units: list[Unit], corpus: Path, ray_config: RayConfig) -> list[Finished]:
    """Brings every unit of `stage` up to date and returns them in order; prints what is redone and why.

    A failed unit doesn't stop the others. At the end raises FailedError, with one line for each failure.
    """
    ownership.claim(corpus)  # first, since workers of a killed build may still be changing the corpus
    wanted = {unit.name: fingerprint([stage.name, stage.version, unit.inputs]) for unit in units}
    done = {unit.name: _committed(corpus, stage.name, unit.name) for unit in units}
    reasons = {unit.name: _why_redo(corpus, done[unit.name], wanted[unit.name]) for unit in units}
    todo = [unit for unit in units if reasons[unit.name]]
    kept = len(units) - len(todo)
    if not units:  # print nothing for a stage that this config doesn't use
        pass
    elif not todo:
        print(f"{stage.name}: {kept} of {counted(kept, 'unit')} up to date")
    else:
        because = ", ".join(sorted({reasons[unit.name] for unit in todo}))
        print(f"{stage.name}: {counted(len(todo), 'unit')} to do ({because}), {kept} up to date", flush=True)
        errors = []
        sizes = {unit.name: unit.bytes for unit in todo}
        size = (lambda row: sizes[row["name"]]) if all(sizes.values()) else None
        notes = _notes(corpus, stage.name)
        shutil.rmtree(notes, ignore_errors=True)  # left by workers that were killed
        notes.mkdir(parents=True, exist_ok=True)
        rows = _on_ray(stage, todo, wanted, corpus, ray_config)
        for row in track(rows, len(todo), stage.name, size, sum(sizes.values()), lambda: progress.noted(notes)):
            if "error" in row:
                errors.append((row["exit_code"], row["error"]))
            else:
                done[row["name"]] = Finished(**row)
        shutil.rmtree(notes, ignore_errors=True)
        if errors:
            _raise(errors)
    _forget_others(corpus, stage.name, set(wanted))
    return [finished for unit in units if (finished := done[unit.name]) is not None]


def _why_redo(corpus: Path, finished: Finished | None, wanted: str) -> str:
    if finished is None:
        return "new"
    if finished.fingerprint != wanted:
        return "input or config changed"
    for name, output in finished.outputs.items():
        path = corpus / name
        if not path.exists() or path.stat().st_size != output["bytes"]:
            return "output missing or cut"
    return ""


def forget_damaged(corpus: Path) -> list[str]:
    """Removes the sidecars of units with a damaged or missing file, so that `run` does those units again.

    Reads every file of every stage. Returns the names of the damaged files, relative to `corpus`.
    """
    sidecars = sorted((corpus / ".stages").glob("*/*.json"))
    found = [(sidecar, _committed(corpus, sidecar.parent.name, sidecar.stem)) for sidecar in sidecars]
    written = [
        (sidecar, name, output)
        for sidecar, finished in found
        if finished is not None
        for name, output in finished.outputs.items()
    ]
    damaged = []
    with ThreadPoolExecutor() as pool:
        whole = pool.map(lambda item: _is_whole(corpus / item[1], item[2]), written)
        checked = track(zip(written, whole, strict=True), len(written), "checking")
        for (sidecar, name, _), as_written in checked:
            if not as_written:
                sidecar.unlink(missing_ok=True)
                damaged.append(name)
    return damaged


def _is_whole(path: Path, output: Json) -> bool:
    return path.is_file() and path.stat().st_size == output["bytes"] and sha256(path) == output["sha256"]


def _committed(corpus: Path, stage: str, unit: str) -> Finished | None:
    """The unit recorded in its sidecar, or None if the sidecar is missing or damaged: the work is then done again."""
    try:
        return _FINISHED.validate_json(_sidecar(corpus, stage, unit).read_bytes(), strict=True)
    except (FileNotFoundError, ValidationError):
        return None


def _sidecar(corpus: Path, stage: str, unit: str) -> Path:
    return corpus / ".stages" / stage / f"{unit}.json"


def _notes(corpus: Path, stage: str) -> Path:
    """Where workers note their progress."""
    return corpus / ".stages" / "progress" / stage


def _forget_others(corpus: Path, stage: str, names: set[str]) -> None:
    """Removes sidecars and outputs of units that are no longer in the plan."""
    for sidecar in (corpus / ".stages" / stage).glob("*.json"):
        if sidecar.stem not in names:
            stale = _committed(corpus, stage, sidecar.stem)
            sidecar.unlink()
            for name in stale.outputs if stale else ():
                (corpus / name).unlink(missing_ok=True)


def _perform(stage: Stage, unit: Unit, wanted: str, corpus: Path, token: str) -> Json:
    """Runs in a worker: does the work and commits it. Returns the committed row, or the error."""
    started = time.process_time()
    try:
        with ownership.at_work(corpus, token), progress.noted_in(_notes(corpus, stage.name) / unit.name):
            result = stage.work(corpus, unit.spec)
            parts = [name for part in result.get("parts", ()) for name in (part["path"], part["urls"]) if name]
            outputs = {
                name: {"bytes": (corpus / name).stat().st_size, "sha256": sha256(corpus / name)}
                for name in (*unit.outputs, *parts)
            }
            finished = Finished(unit.name, wanted, result, outputs, round(time.process_time() - started, 3))
            write_json(_sidecar(corpus, stage.name, unit.name), asdict(finished))
            return asdict(finished)
    except UserError as error:
        return {"name": unit.name, "error": str(error), "exit_code": error.exit_code}
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return _failure(stage, unit.name, f"out of memory on {socket.gethostname()}")
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            return _bug(stage, unit, corpus, error)
        message = f"{corpus}: {os.strerror(error.errno)}; what is finished is kept"
        return {"name": unit.name, "error": message, "exit_code": 1}
    except MemoryError as error:
        reason = " ".join(f"out of memory on {socket.gethostname()}: {error}".split()).rstrip(": ")
        return _failure(stage, unit.name, reason)
    except Exception as error:
        return _bug(stage, unit, corpus, error)


def _failure(stage: Stage, unit: str, reason: str) -> Json:
    """The row of a unit that ran out of memory."""
    way_out = f"{stage.way_out}, or use a machine with more memory"
    message = f"{stage.name}: unit {unit}: {reason}; {way_out}; what is finished is kept"
    return {"name": unit, "error": message, "exit_code": FailedError.exit_code}


def _bug(stage: Stage, unit: Unit, corpus: Path, error: Exception) -> Json:
    """The row of a unit that failed unexpectedly. Saves the traceback for a bug report and names its file."""
    path = corpus / ".stages" / "failures" / f"{stage.name}-{unit.name}.txt"
    write_bytes(path, "".join(traceback.format_exception(error)).encode())
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    message = f"{stage.name}: unit {unit.name} failed: {reason} (traceback: {path})"
    return {"name": unit.name, "error": message, "exit_code": 1}


def _raise(errors: list[tuple[int, str]]) -> None:
    message = "\n".join(dict.fromkeys(text for _, text in errors))
    raise UserError(message) if max(code for code, _ in errors) == UserError.exit_code else FailedError(message)


def _on_ray(
    stage: Stage, todo: list[Unit], wanted: dict[str, str], corpus: Path, ray_config: RayConfig
) -> Iterator[Json]:
    from data_pipeline.execution import ray_cluster

    corpus = corpus.resolve()
    token = ownership.begin(corpus)
    ray_cluster.start(ray_config, corpus, token)

    def perform(row: str) -> str:
        unit, made_from = json.loads(row)
        return json.dumps(_perform(stage, Unit(**unit), made_from, corpus, token))

    rows = {unit.name: json.dumps([asdict(unit), wanted[unit.name]]) for unit in todo}
    for name, answer in ray_cluster.each(perform, rows, stage.name):
        yield _failure(stage, name, answer.reason) if isinstance(answer, ray_cluster.Lost) else json.loads(answer)
