"""The commands, without the wheels: the file of rows, the columns, and a process that was killed."""

import csv
import shutil
import sys

import pytest
from molecules import __main__ as commands
from molecules import decoration
from molecules.metrics import columns, measured
from typer.testing import CliRunner

from data_pipeline.base.errors import UserError


@pytest.fixture
def check(tmp_path, monkeypatch):
    """`check` of a file of three molecules, with these metrics in place of the wheel's."""
    samples = tmp_path / "samples.txt"
    samples.write_text("CCO\nCC\nC\n")

    def called(found: dict[str, float], *options: str) -> None:
        monkeypatch.setattr(commands, "measured", lambda smiles, everything: found)
        arguments = ["check", str(samples), "--out", str(tmp_path / "rows.csv"), *options]
        CliRunner().invoke(commands.app, arguments, catch_exceptions=False)

    return called


def test_a_metric_that_is_not_defined_is_an_empty_cell(check, tmp_path):
    whole = {name: number / 4 for number, name in enumerate(columns())}
    check(whole)
    check({"valid": 0.5})
    check({name: value for name, value in whole.items() if name != "FCD/Test"})
    with (tmp_path / "rows.csv").open(newline="") as file:
        first, few, last = csv.DictReader(file)
    assert first == {"samples": "samples.txt", "molecules": "3", **{name: str(value) for name, value in whole.items()}}
    assert few == {**dict.fromkeys(first, ""), "samples": "samples.txt", "molecules": "3", "valid": "0.5"}
    assert last == {**first, "FCD/Test": ""}


def test_a_row_with_other_columns_is_refused(check, tmp_path):
    check({"valid": 0.5})
    before = (tmp_path / "rows.csv").read_bytes()
    with pytest.raises(UserError, match=r"rows\.csv: has other columns; expected samples,molecules,valid,.*,weight;"):
        check({"valid": 0.5}, "--all")
    assert (tmp_path / "rows.csv").read_bytes() == before


def test_a_process_that_ends_without_a_word_is_named_by_its_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match=r"^the metrics' process ended with exit code 1$"):
        measured(["CCO"])


def test_the_last_column_of_scaffolds_says_of_how_many_samples():
    assert decoration.columns(5)[-1] == "different, of 5"


def test_one_scaffold_has_no_control():
    done = CliRunner().invoke(commands.app, ["scaffolds", "run", "--number", "1"])
    assert done.exit_code == 2
    assert "--number" in done.output
