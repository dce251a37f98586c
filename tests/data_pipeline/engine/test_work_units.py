"""What ends a stage before all of its units were tried."""

from dataclasses import dataclass

import pytest

from data_pipeline.base.errors import FailedError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Result, Stage, Unit, run
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


def test_other_failures_and_successes_between_them_end_no_stage(tmp_path):
    told = tried(LocalStore(tmp_path), [*["one"] * 19, "", *["one"] * 19, "another", "one"]).splitlines()
    assert len(told) == 19 + 19 + 2 + 1
    assert len(list((tmp_path / "tried").iterdir())) == 41
