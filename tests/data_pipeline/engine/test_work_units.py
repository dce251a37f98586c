"""What ends a stage before all of its units were tried, and what is kept of finished units."""

import resource
from dataclasses import dataclass

import pytest
from pydantic_core import to_json

from data_pipeline.base.errors import FailedError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.context import Context
from data_pipeline.engine.records import Records
from data_pipeline.engine.work_units import Finished, Result, Stage, Unit, recorded, run
from data_pipeline.engine.workers import without_ray


@dataclass(frozen=True)
class Work:
    name: str
    fails: str  # the message; "": writes a file


def work(context: Context, spec: Work) -> Result:
    with context.store.put(f"tried/{spec.name}") as path:
        path.touch()
    if spec.fails:
        raise ValueError(spec.fails)
    return Result()


STAGE = Stage("units", 1, work, "a way out")


def tried(corpus: LocalStore, failures: list[str]) -> str:
    """Runs a unit for each of `failures`. Returns what the run is told."""
    units = [Unit(f"part-{n:05d}", Work(f"part-{n:05d}", one), "") for n, one in enumerate(failures)]
    with without_ray(), pytest.raises(FailedError) as error:
        run(STAGE, units, corpus, RayConfig())
    corpus.release()
    return str(error.value)


def test_a_stage_ends_in_one_line_once_20_units_in_a_row_have_failed_alike(tmp_path):
    corpus = LocalStore(tmp_path)
    failure, how_far = tried(corpus, ["", *["list index out of range"] * 50]).splitlines()
    assert failure.startswith("units: unit part-00020 failed: ValueError: list index out of range (traceback: ")
    assert failure.endswith("; the last 20 units failed alike, so the stage ends")
    assert how_far == "units: 1 of 51 units done; the same command continues"
    assert len(list((tmp_path / "tried").iterdir())) == 21


def test_the_traceback_that_is_kept_has_no_password(tmp_path):
    tried(LocalStore(tmp_path), ["https://me:hunter2@host/a: no such thing"])
    (kept,) = (tmp_path / ".stages/failures").iterdir()
    assert "ValueError: https://me:***@host/a: no such thing" in kept.read_text()


def test_other_failures_and_successes_between_them_end_no_stage(tmp_path):
    told = tried(LocalStore(tmp_path), [*["one"] * 19, "", *["one"] * 19, "another", "one"]).splitlines()
    assert len(told) == 19 + 19 + 2 + 1
    assert len(list((tmp_path / "tried").iterdir())) == 41


@dataclass(frozen=True, slots=True)
class Kept(Result):
    number: int


@dataclass(frozen=True)
class Whole(Kept):
    counts: dict[str, int]


def count(context: Context, spec: Work) -> Whole:
    return Whole(int(spec.name), {"words": 2 * int(spec.name)})


def test_a_stage_keeps_a_part_of_a_result_and_records_the_whole(tmp_path):
    stage: Stage[Work, Kept] = Stage("counts", 1, count, "a way out", keeps=Kept)
    units = [Unit(str(number), Work(str(number), ""), "") for number in range(3)]
    store = LocalStore(tmp_path)
    with without_ray():
        done, again = run(stage, units, store, RayConfig()), run(stage, units, store, RayConfig())
    store.release()
    assert [unit.result for unit in done] == [unit.result for unit in again] == [Kept(0), Kept(1), Kept(2)]
    whole = [unit.result for unit in recorded(stage, Whole, store)]
    assert whole == [Whole(number, {"words": 2 * number}) for number in range(3)]


STAGE_OF_COUNTS = Stage("counts", 1, count, "a way out")
COUNTED = Unit("0", Work("0", ""), "")


def test_a_damaged_record_is_no_whole_result(tmp_path):
    store = LocalStore(tmp_path)
    store.append(".stages/counts/finished.jsonl", b'{"name": "0"\n', [])
    with pytest.raises(FailedError, match=r"counts/finished\.jsonl: damaged"):
        list(recorded(Stage("counts", 1, count, ""), Whole, store))
    with without_ray():
        for _ in range(2):  # the second has nothing to do
            run(STAGE_OF_COUNTS, [COUNTED], store, RayConfig())
            assert [unit.result for unit in recorded(STAGE_OF_COUNTS, Whole, store)] == [Whole(0, {"words": 0})]
            store.append(".stages/counts/finished.jsonl", b'{"name": "1"\n', [])
        run(STAGE_OF_COUNTS, [COUNTED], store, RayConfig())
    store.release()
    assert len([*recorded(STAGE_OF_COUNTS, Whole, store)]) == 1


def test_a_disk_that_is_full_while_records_are_added_damages_none(tmp_path):
    """They are added again at the end, and by a build that ends in the middle of that, twice."""
    store, records = LocalStore(tmp_path), Records(LocalStore(tmp_path), "counts")
    done = [Finished(str(number), "", Whole(number, {}), {}, 0.0, 0.0) for number in range(9)]
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with records as add:
        add(done[0])
        records.waiting = done[1:]
        resource.setrlimit(resource.RLIMIT_FSIZE, (450, most))
        try:
            with pytest.raises(OSError, match="File too large"):
                records._flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert [*store.lines(records._file)] == [to_json(unit) for unit in done]
    store.append(records._file, to_json(done[8]) + b"\n", [])
    assert [*recorded(STAGE_OF_COUNTS, Whole, store)] == done
