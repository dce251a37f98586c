"""The documents in a corpus's first rows, which `data-pipeline show` names."""

import re

import numpy as np

from data_pipeline.corpus import open_corpus
from data_pipeline.loading.reader import Reader
from tests.conftest import run, write_corpus_file
from tests.support.runs import install_page


def test_documents_that_a_package_format_keeps_together_are_those_of_the_rows(tmp_path, monkeypatch):
    settings = install_page("reference/own-formats", tmp_path, monkeypatch)  # three verses follow each other
    settings["sources"][0]["path"] = str(tmp_path / "verses.txt")
    verses = "".join(f"Verse number {number}.\n" for number in range(1, 61))
    (tmp_path / "verses.txt").write_text(f"VERSES\n{verses}")
    own = {"tokenizer": {"kind": "bytes"}, "split": {"validation_fraction": 0}}
    built = run("data-pipeline", "build", write_corpus_file(tmp_path / "corpus.yaml", **settings, **own))
    assert built.returncode == 0, built.stderr
    corpus = open_corpus(tmp_path / "corpus")
    rows = Reader(corpus, "train").tokens(np.arange(3))
    text = corpus.tokenizer.decode([token for row in rows.values for token in row.tolist()])
    numbers = re.findall(r"VERSE NUMBER (\d+)\.", text)[:3]
    ids = ", ".join(f"verses/verses.txt/{int(number):09d}" for number in numbers)
    shown = run("data-pipeline", "show", tmp_path / "corpus", "-n", "3")
    assert re.findall(r"^documents: (.*?)(?:, …)?\. Next", shown.stdout, re.MULTILINE) == [ids], shown.stderr
