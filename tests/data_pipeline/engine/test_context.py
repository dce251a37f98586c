"""What the work of a unit gets in a worker."""

import queue
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.base import progress
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.progress import Activity
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.context import Attempt, Context
from data_pipeline.engine.work_units import Result, Stage, Unit, run
from data_pipeline.engine.workers import without_ray


def test_reports_are_sent_while_a_unit_takes_long_and_at_once_where_it_may_kill_its_process(monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_REPORTS", 0.001)
    sent, confirmed, activity = queue.SimpleQueue(), [], Activity("unit", 2)
    context = Context(LocalStore(Path()), Attempt(activity, confirm=lambda it: confirmed.append(replace(it))))
    context.file("a.gz")
    context.checksum("a.gz").progress.advance(5)
    reporter = progress.Reporter()
    with reporter.reporting(lambda: sent.put(replace(activity))):
        assert sent.get(timeout=120) == Activity("unit", 2, 5, "a.gz", "a.gz")
    with reporter.reporting(lambda: sent.put("next")):
        while sent.get(timeout=120) != "next":  # the first unit's last reports may come before
            pass
    context.progress.doing = "sorting"  # no other file
    assert confirmed == [Activity("unit", 2, 0, "a.gz", "a.gz")]


@dataclass(frozen=True)
class Seen(Result):
    made: str


MADE = list[str]()


def work(context: Context, spec: str) -> Seen:
    """Makes something that its stage's units share."""

    def make() -> str:
        MADE.append(spec)
        return spec

    return Seen(context.cached("it", make))


def test_cached_is_made_once_for_the_units_of_a_stage_and_anew_for_other_stages_and_builds(tmp_path):
    units = [Unit(name, name, "") for name in ("a", "b", "c")]
    stages = [Stage(name, 1, work, "") for name in ("first", "second")]
    found = []
    with without_ray():
        for folder in ("one", "two"):
            corpus = LocalStore(tmp_path / folder)
            found += [[unit.result.made for unit in run(stage, units, corpus, RayConfig())] for stage in stages]
            corpus.release()
        assert [Context(corpus).cached("it", lambda: "alone"), Context(corpus).cached("it", lambda: "anew")] == [
            "alone",
            "anew",
        ]
    assert found == [["a", "a", "a"]] * 4
    assert MADE == ["a"] * 4


def test_what_a_stage_shares_is_freed_when_the_next_stage_begins():
    class Model:
        pass

    corpus = LocalStore(Path())
    made = weakref.ref(Context(corpus, shared="first").cached("it", Model))
    assert made() is not None
    Context(corpus, shared="second")
    assert made() is None
