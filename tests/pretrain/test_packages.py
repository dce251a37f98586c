"""What a package of one's own offers, on the example of the page that says how."""

import json

from tests.conftest import run as run_command
from tests.conftest import write_corpus_file
from tests.pretrain.runs import MODEL, install_page, losses, run_file

LINES = [f"{number} Lines of Words, in a Row" for number in range(200)]
FORTUNES = ["The River runs to the Sea", "HASTE MAKES WASTE", "Anna sings in Ulm", *LINES, f"{LINES[7]} again"]


def test_an_objective_a_source_a_rule_a_step_and_a_family_of_a_package_train(small_corpus, tmp_path, monkeypatch):
    settings = install_page("extend", tmp_path, monkeypatch)
    (tmp_path / "fortunes.txt").write_text("\n%\n".join(FORTUNES))
    settings["sources"][0]["path"] = str(tmp_path / "fortunes.txt")
    tokenizer = {"path": str(small_corpus / "tokenizer/spiece.model"), "sentinels": 40}
    split = {"by": "position", "validation_fraction": 0.1}
    output = {"output": str(tmp_path / "corpus")}
    path = write_corpus_file(tmp_path / "corpus.yaml", **settings, tokenizer=tokenizer, split=split, **output)
    done = run_command("data-pipeline", "build", path)
    assert done.returncode == 0, done.stderr
    dropped = json.loads((tmp_path / "corpus/report.json").read_text())["documents"]["dropped"]
    assert dropped == {"shouting": 1, "same_opening": 1}
    run = run_file(tmp_path / "run", tmp_path / "corpus", model={**MODEL, "family": "tempered"})
    done = run_command("pretrain", "train", run)
    assert done.returncode == 0, done.stderr
    assert len(losses(run)) == 8
