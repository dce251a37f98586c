"""What a package of one's own offers, on the example of the page that says how."""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.conftest import run as run_command
from tests.conftest import write_corpus_file
from tests.pretrain.runs import MODEL, losses, run_file

PAGE = Path(__file__).parents[2] / "docs/how-to/extend.md"
LINES = [f"{number} Lines of Words, in a Row" for number in range(200)]
FORTUNES = ["The River runs to the Sea", "HASTE MAKES WASTE", "Anna sings in Ulm", *LINES, f"{LINES[7]} again"]


@pytest.fixture
def installed(tmp_path, monkeypatch) -> dict:
    """The page's package, as pip install -e writes it; returns the page's settings of a corpus file."""
    page = PAGE.read_text()
    for file, code in re.findall(r"```\w+\n# ([\w./]+)(?::[^\n]*)?\n(.*?)```", page, re.DOTALL):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(code)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "my_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (settings,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    return yaml.safe_load(settings)


def test_an_objective_a_source_a_rule_a_step_and_a_family_of_a_package_train(installed, small_corpus, tmp_path):
    (tmp_path / "fortunes.txt").write_text("\n%\n".join(FORTUNES))
    installed["sources"][0]["path"] = str(tmp_path / "fortunes.txt")
    tokenizer = {"path": str(small_corpus / "tokenizer/spiece.model"), "sentinels": 40}
    split = {"by": "position", "validation_fraction": 0.1}
    output = {"output": str(tmp_path / "corpus")}
    path = write_corpus_file(tmp_path / "corpus.yaml", **installed, tokenizer=tokenizer, split=split, **output)
    done = run_command("data-pipeline", "build", path)
    assert done.returncode == 0, done.stderr
    dropped = json.loads((tmp_path / "corpus/report.json").read_text())["documents"]["dropped"]
    assert dropped == {"shouting": 1, "same_opening": 1}
    run = run_file(tmp_path / "run", tmp_path / "corpus", model={**MODEL, "family": "tempered"})
    done = run_command("pretrain", "train", run)
    assert done.returncode == 0, done.stderr
    assert len(losses(run)) == 8
