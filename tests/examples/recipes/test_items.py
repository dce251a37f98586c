"""Histories and next items are split as leave-one-out says, and baselines rank by counts."""

import json

import pytest
from typer.testing import CliRunner

from data_pipeline.base.errors import UserError
from examples.recipes.items import app, pairs, ranked

HISTORIES = {"u": [0, 1, 2, 3], "v": [2, 1], "w": [3]}
CODES = {"0": [1, 1], "1": [1, 2], "2": [7, 1], "3": [7, 2]}


def test_the_last_item_is_the_test_and_the_one_before_it_the_validation():
    found = pairs([*HISTORIES.values()])
    assert found == {"train": [([0], 1)], "validation": [([0, 1], 2)], "test": [([0, 1, 2], 3), ([2], 1)]}
    (longest,) = pairs([list(range(30))])["test"]
    assert longest == (list(range(9, 29)), 29)  # cut to 20


def test_items_are_ranked_by_count_then_by_popularity_without_those_seen():
    assert ranked({"a": 1, "b": 2, "c": 1, "d": 9}, {"a": 5, "b": 1, "c": 7}, {"d"}) == ["b", "c", "a"]


def test_the_files_of_the_data_and_the_baselines(tmp_path):
    histories, codes, out = tmp_path / "inter.json", tmp_path / "index.json", tmp_path / "out"
    histories.write_text(json.dumps(HISTORIES))
    codes.write_text(json.dumps(CODES))
    assert CliRunner().invoke(app, ["data", str(histories), str(codes), str(out)]).exit_code == 0
    assert (out / "train.tsv").read_text() == "a1 b1\ta1 b2\n"
    assert (out / "test.tsv").read_text() == "a1 b1 a1 b2 a7 b1\ta7 b2\na7 b1\ta1 b2\n"
    assert (out / "items.txt").read_text() == "a1 b1\na1 b2\na7 b1\na7 b2\n"
    lines = CliRunner().invoke(app, ["baselines", str(out)]).stdout.splitlines()
    # a1 b2 is the only popular item: right for the second user alone
    assert lines[1] == "popular items,0.5000,0.5000,0.5000,0.5000"


@pytest.mark.parametrize(
    ("codes", "said"),
    [({**CODES, "3": [1, 1]}, "two items have the same codes"), ({"0": [1, 1]}, "has no codes for 3 items, such as 1")],
)
def test_wrong_codes_are_refused(tmp_path, codes, said):
    histories, file = tmp_path / "inter.json", tmp_path / "index.json"
    histories.write_text(json.dumps(HISTORIES))
    file.write_text(json.dumps(codes))
    done = CliRunner().invoke(app, ["data", str(histories), str(file), str(tmp_path / "out")])
    assert isinstance(done.exception, UserError)
    assert said in str(done.exception)
    assert not (tmp_path / "out").exists()
