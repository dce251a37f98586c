"""The steps of installed packages, in the order of the list."""

import pyarrow.parquet as pq

from data_pipeline.corpus import open_corpus
from data_pipeline.stages import report
from tests.conftest import run, write_corpus_file
from tests.support.builds import OFF, page, write_pages
from tests.support.runs import install_page

PAGES = ["A heading.\nThe river. The end. More", "A heading.\nThe sea. The end", "A heading.\nNo such words."]


def test_steps_of_a_package_take_documents_in_the_order_of_the_list(tmp_path, monkeypatch):
    settings = install_page("reference/own-steps", tmp_path, monkeypatch)
    write_pages(tmp_path / "0.json.gz", (page(text, f"http://{n}.org/") for n, text in enumerate(PAGES)))
    settings |= {"tokenizer": {"kind": "bytes"}, "split": {"validation_fraction": 0}}
    corpus = write_corpus_file(tmp_path / "corpus.yaml", **{"cleaning": None, "dedup": None, **settings})
    done = run("data-pipeline", "build", corpus)
    assert done.returncode == 0, done.stderr
    texts = pq.read_table(tmp_path / "corpus/documents/part-00000.parquet")["text"].to_pylist()
    whole = [text.partition("The end")[0] + "The end" for text in PAGES[:2]]
    assert sorted(text.split("\n")[-1] for text in texts) == sorted(text.split("\n")[-1] for text in whole)
    assert sorted(text.count("\n") for text in texts) == [0, 1]  # one keeps the heading
    found = report.read(tmp_path / "corpus")
    assert found.documents.dropped == {"no_end": 1}
    assert found.lines.dropped == {"duplicate_heading": 1}
    assert open_corpus(tmp_path / "corpus").manifest.config["packages"] == ["my_package 1.0"]

    settings["steps"][0].pop("word")
    wrong = write_corpus_file(tmp_path / "wrong.yaml", **{"cleaning": None, "dedup": OFF, **settings})
    said = run("data-pipeline", "documents", wrong).stderr.splitlines()
    assert said == [f"error: {wrong}: steps.0.word: missing (the word)"]
