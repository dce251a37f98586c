"""Which nodes get units, after units failed on some."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.base.errors import NodeUnfit
from data_pipeline.engine import fitness
from data_pipeline.engine.nodes import Nodes
from tests.tables import each


@pytest.fixture
def nodes() -> Nodes:
    nodes = Nodes("tokens")
    nodes.alive = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    return nodes


def test_a_unit_is_tried_on_one_other_node_and_three_units_that_fail_on_a_node_put_it_out(nodes, capsys):
    for number in range(2):
        assert nodes.add_failure("a", f"part-{number}", "no space")
        assert nodes.avoided_by(f"part-{number}") == {"a"}
        assert nodes.avoided_by("others") == set()
    assert nodes.add_failure("a", "part-1", "no space")  # the same one again
    assert nodes.left_out == set()
    assert nodes.add_failure("a", "part-2", "read-only")
    assert nodes.left_out == nodes.avoided_by("others") == {"a"}
    assert nodes.why_left_out() == ["node 10.0.0.1: read-only"]
    assert capsys.readouterr().err.splitlines() == [
        "warning: tokens: node 10.0.0.1: unit part-0 failed: no space; another node tries it",
        "warning: tokens: node 10.0.0.1 is left out: 3 units failed there, the last one: read-only",
    ]


def test_units_that_fail_on_two_nodes_are_themselves_at_fault(nodes):
    """Of any number of them, none puts out a node."""
    for number in range(10):
        assert nodes.add_failure("a", f"part-{number}", "no such file")
        assert not nodes.add_failure("b", f"part-{number}", "no such file")
        assert nodes.avoided_by(f"part-{number}") == {"a", "b"}  # if its worker has died, a third node tries it
    assert nodes.left_out == set()


def test_where_there_is_no_other_node_a_failure_is_final(nodes):
    nodes.add_unfit("b", "another version")
    nodes.add_unfit("c", "no output")
    assert not nodes.add_failure("a", "part-0", "no space")
    assert nodes.avoided_by("part-0") == {"b", "c"}
    nodes.alive = {"a": "10.0.0.1"}
    assert not nodes.add_failure("a", "part-1", "no space")
    assert nodes.avoided_by("part-0") == set()


def test_a_unit_goes_to_nodes_that_are_left_out_for_others_rather_than_nowhere(nodes):
    nodes.alive = {"a": "10.0.0.1", "b": "10.0.0.2"}
    for unit in ("part-0", "part-1", "part-2"):
        nodes.add_failure("b", unit, "no space")
    nodes.add_failure("a", "part-9", "no space")
    assert nodes.avoided_by("part-9") == {"a"}
    assert nodes.some_left
    for unit in ("part-7", "part-8"):
        nodes.add_failure("a", unit, "no space")
    assert not nodes.some_left
    assert nodes.some_fit  # the failed ones can still be tried


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


@each("kind", ["dedup_steps", "objectives", "rules", "sources"])
def test_a_node_with_another_version_of_a_package_that_a_corpus_file_may_name_is_unfit(installed, kind):
    (installed / "entry_points.txt").write_text(f"[encdec_pretrain.{kind}]\nquiet = own:Quiet\n")
    here = fitness.versions()
    fitness.check(here)
    with pytest.raises(NodeUnfit, match=r"it has own 2\.0 \(the command has 1\.0\); install"):
        fitness.check({**here, "own": "1.0"})
