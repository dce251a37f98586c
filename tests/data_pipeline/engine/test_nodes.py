"""Which nodes get units, after units failed on some."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.base.errors import NodeUnfit
from data_pipeline.engine import fitness
from data_pipeline.engine.nodes import Nodes
from tests.support.tables import each


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def nodes(clock) -> Nodes:
    nodes = Nodes("tokens", clock)
    nodes.alive = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    return nodes


def test_a_unit_is_tried_on_other_nodes_and_three_units_that_fail_on_a_node_put_it_out(nodes, capsys):
    for number in range(2):
        assert nodes.add_failure("a", f"part-{number}", "no space")
        assert nodes.avoided_by(f"part-{number}") == {"a"}
        assert nodes.avoided_by("others") == set()
    assert nodes.add_failure("a", "part-1", "no space")  # the same one again
    assert nodes.left_out == set()
    assert nodes.add_failure("a", "part-2", "read-only")
    assert nodes.left_out == nodes.avoided_by("others") == {"a"}
    assert nodes.causes() == ["node 10.0.0.1: read-only"]
    assert capsys.readouterr().err.splitlines() == [
        "warning: tokens: node 10.0.0.1: unit part-0 failed: no space; another node tries it",
        "warning: tokens: node 10.0.0.1 is left out: 3 units failed there, the last one: read-only",
    ]


def test_a_failing_node_is_left_out_twice_as_long_each_time_and_back_once_it_has_finished_a_unit(nodes, clock, capsys):
    for number in range(3):
        nodes.add_failure("a", f"part-{number}", "no space")
    for number, pause in enumerate((1, 2, 4, 8, 16, 32, 60, 60), 3):
        clock.now += pause - 0.5
        assert nodes.left_out == {"a"}
        clock.now += 0.5
        assert nodes.left_out == set()
        nodes.add_failure("a", f"part-{number}", "no space")
        nodes.add_failure("a", f"part-{number + 100}", "no space")  # at the same time: no longer for it
    nodes.add_finish("a", "another")
    assert nodes.left_out == set()
    for number in range(2):  # what failed before is forgotten
        nodes.add_failure("a", f"part-{number + 200}", "no space")
    assert nodes.left_out == set()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert told[-1] == "warning: tokens: node 10.0.0.1 takes units again: it has finished unit another"


def test_units_that_fail_on_two_nodes_are_themselves_at_fault(nodes):
    """Of any number of them, none puts out a node."""
    for number in range(10):
        assert nodes.add_failure("a", f"part-{number}", "no such file")
        assert nodes.add_failure("b", f"part-{number}", "no such file")
        assert nodes.avoided_by(f"part-{number}") == {"a", "b"}
    assert nodes.left_out == set()


def test_units_that_a_third_node_finishes_put_out_both_nodes_on_which_they_failed(nodes):
    for number in range(3):
        nodes.add_failure("a", f"part-{number}", "illegal instruction")
        nodes.add_failure("b", f"part-{number}", "illegal instruction")
        nodes.add_finish("c", f"part-{number}")
    assert nodes.left_out == {"a", "b"}


def test_nodes_that_all_fail_are_not_to_blame_and_for_a_minute_no_unit_is(nodes, clock, capsys):
    assert nodes.add_failure("a", "part-0", "stale")
    assert nodes.add_failure("b", "part-1", "stale")
    assert nodes.some_left
    assert not nodes.add_failure("c", "part-2", "stale")
    assert not nodes.some_left  # all pause
    clock.now = 1.0
    assert nodes.some_left
    clock.now = 60.0
    assert not nodes.add_failure("a", "part-0", "stale")
    clock.now = 62.5  # the second pause, of 2 s, is over
    for number in range(10):
        assert nodes.add_failure("a", f"part-{number}", "stale")
    assert nodes.some_left
    clock.now = 300.5
    assert not nodes.some_left
    assert not nodes.may_recover
    assert nodes.causes() == [f"node 10.0.0.{number}: stale" for number in (1, 2, 3)]
    nodes.add_finish("a", "part-9")
    assert nodes.some_left
    told = capsys.readouterr().err.splitlines()
    assert told[2:] == ["warning: tokens: units fail on all nodes, the last one: stale; trying again for 60 s"]


def test_the_last_try_of_a_unit_goes_to_a_node_that_works_before_one_of_which_nothing_is_known(nodes):
    nodes.add_failure("a", "part-0", "no space")
    nodes.add_failure("b", "part-1", "no space")
    assert nodes.avoided_by("part-1") == {"b"}
    assert nodes.avoided_by("part-1", last=True) == {"a", "b"}
    nodes.add_finish("a", "part-2")
    assert nodes.avoided_by("part-1", last=True) == {"b", "c"}
    nodes.add_finish("c", "part-3")
    assert nodes.avoided_by("part-1", last=True) == {"b"}


def test_a_node_gets_all_units_if_there_is_no_other_node(nodes):
    nodes.add_unfit("b", "another version")
    nodes.add_unfit("c", "no output")
    assert nodes.add_failure("a", "part-0", "no space")
    assert nodes.fit == {"a"}
    assert nodes.avoided_by("part-0") == {"b", "c"}
    nodes.alive = {"a": "10.0.0.1"}
    assert nodes.add_failure("a", "part-1", "no space")
    assert nodes.avoided_by("part-0") == set()
    nodes.add_unfit("a", "no output")
    assert not nodes.may_recover


def test_a_unit_goes_to_nodes_that_are_left_out_for_others_rather_than_nowhere(nodes):
    nodes.alive = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    for unit in ("part-0", "part-1", "part-2"):
        nodes.add_failure("b", unit, "no space")
    nodes.add_unfit("c", "no output")
    nodes.add_finish("b", "part-3")
    for unit in ("part-0", "part-1", "part-2"):
        nodes.add_failure("b", unit, "no space")
    nodes.add_failure("a", "part-9", "no space")
    assert nodes.avoided_by("part-9") == {"a", "c"}


def test_nodes_with_one_address_are_told_apart(nodes, capsys):
    nodes.alive = {"0123456789": "10.0.0.1", "9876543210": "10.0.0.1"}
    nodes.add_unfit("9876543210", "no output")
    nodes.add_unfit("9876543210", "no output")
    assert capsys.readouterr().err == "warning: tokens: node 10.0.0.1 (98765432) is left out: no output\n"


def test_an_unfit_node_is_named_once_and_left_out_by_each_stage(nodes, capsys):
    nodes.add_unfit("a", "other code of the first build")
    later = Nodes("shards")
    later.alive = nodes.alive
    later.add_unfit("a", "other code of the first build")
    assert later.left_out == {"a"}
    assert capsys.readouterr().err.count("is left out") == 1


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Iterator[Path]:
    """A package `own` 2.0, which has no code."""
    folder = tmp_path / "own-2.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    fitness.versions.cache_clear()
    yield folder
    fitness.versions.cache_clear()


@each("kind", ["objectives", "sources", "steps", "tokenizers"])
def test_a_node_with_another_version_of_a_package_that_a_corpus_file_may_name_is_unfit(installed, kind):
    (installed / "entry_points.txt").write_text(f"[encdec_pretrain.{kind}]\nquiet = own:Quiet\n")
    here = fitness.versions()
    fitness.check(here)
    with pytest.raises(NodeUnfit, match=r"it has own 2\.0 \(the command has 1\.0\); install"):
        fitness.check({**here, "own": "1.0"})
