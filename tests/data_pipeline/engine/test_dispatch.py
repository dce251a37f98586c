"""Which node does which unit, and what a failure, a lost worker or a node at fault costs, on a fake cluster."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from data_pipeline.base.errors import FailedError, NodeUnfit, StoreError, WorkerDied
from data_pipeline.base.progress import Activity, Board
from data_pipeline.engine import dispatch
from data_pipeline.engine.context import Failed, Needs
from data_pipeline.engine.dispatch import Dispatch
from tests.support.fake_ray import FakeRay
from tests.support.tables import each

GB = 10**9


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(dispatch, "_SECONDS_BETWEEN_LOOKS", 0.0)  # the cluster's own clock tells the time


def units(number: int) -> dict[str, int]:
    return {f"u{one}": one for one in range(number)}


def dispatched(cluster: FakeRay, inputs: dict[str, int], memory: int = 0) -> Iterator[tuple[str, Any]]:
    needs, abandon = Needs(memory), cluster.abandoned.extend
    given = (lambda number, attempt: number), inputs, "tokens", lambda unit: needs, cluster.board, {}
    return Dispatch(*given, abandon, cluster, cluster.clock).results()


def done(cluster: FakeRay, inputs: dict[str, int], memory: int = 0) -> dict[str, Any]:
    """The results of `inputs`, in the order in which they came."""
    return dict(dispatched(cluster, inputs, memory))


def failing(why: str = "no space") -> Failed:
    return Failed(FailedError(why), of_node=True)


def die() -> None:
    raise ray.exceptions.WorkerCrashedError


def nodes_of(cluster: FakeRay, unit: str) -> list[str]:
    return [task.node for task in cluster.begun if task.unit == unit]


def first(number: int, of_each: Callable[[], Any], otherwise: str = "done") -> Callable[[str, str, int], Any]:
    """An outcome: the first `number` tries on each node end as `of_each` says."""
    tried = Counter[str]()

    def outcome(node: str, unit: str, tries: int) -> Any:
        tried[node] += 1
        return of_each() if tried[node] <= number else otherwise

    return outcome


def test_every_unit_is_done_once_and_no_node_has_more_units_than_cpus():
    cluster = FakeRay(lambda node, unit, tries: f"{unit} on {node}", a=2, b=1)
    assert done(cluster, units(7)) == {task.unit: f"{task.unit} on {task.node}" for task in cluster.begun}
    assert [task.unit for task in cluster.begun] == [*units(7)]
    assert cluster.now == 5  # the units are submitted in second 1, begin in 2, 3 and 4, and end a second later
    assert not cluster.abandoned


@each("number", [1, 3, 10])
@each("cpus", [1, 64])
@each("fault", [failing, die])
def test_a_failure_of_all_nodes_at_once_that_passes_costs_no_unit_and_no_node(number, cpus, fault):
    """The first units on each of two nodes fail, as when a shared file system hangs for a moment."""
    cluster = FakeRay(first(number, fault), a=cpus, b=cpus)
    assert done(cluster, units(300)) == dict.fromkeys(units(300), "done")
    later = Counter(task.node for task in cluster.begun[-100:])
    assert min(later["a"], later["b"]) >= 40  # both take units to the end


@each("number", [1, 100])
def test_a_shared_file_system_that_hangs_for_most_of_a_minute_costs_no_unit(number, capsys):
    """Few units are tried meanwhile, and none counts as tried."""
    cluster = FakeRay(lambda node, unit, tries: failing("stale") if cluster.now < 50 else "done", a=4, b=4, c=4)
    assert done(cluster, units(number)) == dict.fromkeys(units(number), "done")
    assert cluster.now < 90
    told = capsys.readouterr().err
    assert told.count("warning: tokens: units fail on all nodes, the last one: stale; trying again for 60 s\n") == 1
    assert len(told.splitlines()) <= 10  # for each node at most: a unit failed, it is left out, it takes units again


def test_units_that_fail_on_all_nodes_for_more_than_a_minute_are_at_fault():
    """Nothing else tells files that no node may read from a file system that hangs."""
    cluster = FakeRay(lambda node, unit, tries: failing() if int(unit[1:]) < 200 else "done", a=2, b=2)
    found = done(cluster, units(210))
    assert [unit for unit, answer in found.items() if answer == "done"] == [f"u{number}" for number in range(200, 210)]
    tries = 4 * 200 + 10
    pauses = 2 * 64  # at the first tries, and at the last tries
    assert cluster.now < pauses + tries / 4 + 20  # all CPUs are busy otherwise


def test_a_stage_ends_if_units_fail_on_all_nodes_for_five_minutes():
    cluster = FakeRay(lambda node, unit, tries: failing("stale"), a=1, b=1)
    with pytest.raises(FailedError, match=r"^tokens: no node is left\nnode a: stale\nnode b: stale$"):
        done(cluster, units(10_000))
    assert 300 < cluster.now < 320


def test_units_that_fail_everywhere_are_reported_and_the_others_are_done():
    bad = {"u3", "u4", "u9"}
    cluster = FakeRay(lambda node, unit, tries: failing("no such file") if unit in bad else "done", a=1, b=1, c=1)
    found = done(cluster, units(30))
    assert {unit for unit, answer in found.items() if answer != "done"} == bad
    assert [*found][-3:] == ["u3", "u4", "u9"]  # last, when it is known which nodes work
    assert len({*nodes_of(cluster, "u3")[:3]}) == 3
    assert [task.others_may_try for task in cluster.begun if task.unit == "u3"] == [True, True, True, False]


@each("cpus", [1, 8])
@each("bad", ["a", "abc"])
@each("fault", [failing, die])
def test_no_unit_fails_while_a_node_works_however_fast_the_others_fail(fault, bad, cpus):
    """The nodes at fault are the first to get a unit. Their workers may die before they import anything."""
    cluster = FakeRay(lambda node, unit, tries: fault() if node in bad else "done", **dict.fromkeys("abcd", cpus))
    assert done(cluster, units(200)) == dict.fromkeys(units(200), "done")
    assert cluster.now <= 1.2 * 200 / (cpus * (4 - len(bad))) + 4  # the nodes that work are busy all the time


def test_a_worker_that_dies_before_its_first_report_leaves_its_node_unknown_and_costs_no_unit():
    """The report may be lost with the worker; the next tries of the unit then go anywhere."""
    cluster = FakeRay(lambda node, unit, tries: die() if node == "a" else "done", a=1, b=3)
    cluster.silent = {"a"}
    assert done(cluster, units(30)) == dict.fromkeys(units(30), "done")


@each("number", [2, 30])
def test_the_last_try_goes_to_a_node_that_has_finished_a_unit_not_to_one_of_which_nothing_is_known(number):
    """All reports of the workers that die are lost, as on a machine too busy to answer."""
    cluster = FakeRay(lambda node, unit, tries: die() if node == "a" else "done", a=1, b=1)
    cluster.mute = {"a"}
    assert done(cluster, units(number)) == dict.fromkeys(units(number), "done")
    assert {task.node for task in cluster.begun if task.tries == 3} <= {"b"}


def test_a_unit_that_kills_its_workers_gets_twice_the_memory_each_time_and_at_last_a_node(capsys):
    cluster = FakeRay(lambda node, unit, tries: die() if unit == "u1" else "done", a=2, b=2)
    found = done(cluster, units(9), memory=GB)
    assert isinstance(found.pop("u1"), WorkerDied)
    assert found == {unit: "done" for unit in units(9) if unit != "u1"}
    asked = [task.memory for task in cluster.begun if task.unit == "u1"]
    assert [round(memory / 1.3e9, 0) for memory in asked[:3]] == [1, 2, 4]
    assert asked[3:] == [10**11]
    assert nodes_of(cluster, "u1")[0] != nodes_of(cluster, "u1")[1]
    assert cluster.begun[-1].unit == "u1"
    assert "u1 failed: its worker died; another node tries it" in capsys.readouterr().err


def test_a_unit_that_a_store_refuses_has_one_more_try_at_once():
    """A store answers all nodes alike, and the result may end the stage."""
    refused = Failed(StoreError("s3://bucket/a: permission denied"), of_node=True)
    cluster = FakeRay(lambda node, unit, tries: refused if unit == "u0" else "done", a=1, b=1)
    found = done(cluster, units(20))
    assert found["u0"] is refused
    assert [*found].index("u0") < 10
    assert nodes_of(cluster, "u0") == ["a", "b"]
    assert [task.others_may_try for task in cluster.begun if task.unit == "u0"] == [True, False]


def test_an_unfit_node_gets_no_more_units_and_the_stage_ends_when_no_node_is_left(capsys):
    unfit = Failed(NodeUnfit("it has another version"), of_node=True)
    cluster = FakeRay(lambda node, unit, tries: unfit if node == "a" else "done", a=1, b=1)
    assert done(cluster, units(9)) == dict.fromkeys(units(9), "done")
    assert {task.node for task in cluster.begun[8:]} == {"b"}  # `a` gets the units that waited in Ray
    assert capsys.readouterr().err == "warning: tokens: node a is left out: it has another version\n"
    with pytest.raises(FailedError, match=r"^tokens: no node is left\nnode a: it has another version\nnode b: it has"):
        done(FakeRay(lambda node, unit, tries: unfit, a=1, b=1), units(9))


def test_a_failure_on_the_only_node_is_final_and_a_lost_worker_is_retried():
    failure = failing()
    outcomes = {"u0": lambda tries: failure, "u1": lambda tries: die() if tries < 3 else "done"}
    cluster = FakeRay(lambda node, unit, tries: outcomes[unit](tries), a=1)
    assert done(cluster, units(2)) == {"u0": failure, "u1": "done"}
    assert [task.others_may_try for task in cluster.begun if task.unit == "u0"] == [False]


def test_a_unit_that_fits_on_no_node_asks_for_the_largest():
    cluster = FakeRay(lambda node, unit, tries: node, a=1, b=1)
    cluster.memory = {"a": 4 * GB, "b": 8 * GB}
    assert done(cluster, units(2), memory=50 * GB) == {"u0": "b", "u1": "b"}


def test_units_that_wait_for_a_node_that_has_left_are_submitted_again():
    cluster = FakeRay(lambda node, unit, tries: node, a=1, b=1)
    cluster.memory = {"a": 4 * GB, "b": 8 * GB}
    outcome = cluster.outcome

    def leaving(node: str, unit: str, tries: int) -> str:
        cluster.cpus.pop("b", None)
        return outcome(node, unit, tries)

    cluster.outcome = leaving
    assert done(cluster, units(3), memory=6 * GB) == dict.fromkeys(units(3), "a")
    assert cluster.begun[0].node == "b"


def test_a_last_try_that_never_begins_ends_in_one_line(capsys):
    """A unit can't have the whole node, of which somebody else has a part."""
    cluster = FakeRay(lambda node, unit, tries: die() if unit == "u0" else "done", a=1)
    nodes, whole = cluster.nodes, cluster.memory["a"]

    def with_less_than_it_has() -> list[dict[str, Any]]:
        cluster.memory["a"] = whole - 1
        found = nodes()
        found[0]["Resources"]["memory"] = whole
        return found

    cluster.nodes = with_less_than_it_has
    found = done(cluster, units(2))
    assert found["u1"] == "done"
    assert str(found["u0"]).startswith("the worker died on every try, and no unit has begun for 10 minutes; Ray finds")
    assert 600 < cluster.now < 620
    assert "warning: tokens: no unit has begun for 10 minutes" in capsys.readouterr().err


def test_running_units_are_abandoned_if_their_results_are_no_longer_wanted():
    cluster = FakeRay(lambda node, unit, tries: "done", a=4)
    results = dispatched(cluster, units(9))
    next(results)
    results.close()
    assert cluster.abandoned
    assert {task.unit for task in cluster.abandoned} <= {*units(9)}


def test_the_first_report_of_a_worker_needs_no_module_of_the_package():
    """A worker sends it before anything is unpickled, since an import may end the worker."""
    board = Board()
    board.begin("node", 7, "u1", 2)
    assert board.by_unit() == {"u1": ("node", Activity("u1", 2))}
