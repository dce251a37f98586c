"""The formats of installed packages: all that a shipped format can do."""

import subprocess
import sys

import pyarrow.parquet as pq

from data_pipeline.corpus import open_corpus
from tests.conftest import run, write_corpus_file
from tests.support.runs import install_page

TOGETHER = "from data_pipeline.config import SourceConfig; print(SourceConfig(format='verses', path='a').together)"


def test_format_of_a_package_is_divided_converted_and_recognised(tmp_path, monkeypatch):
    settings = install_page("reference/own-formats", tmp_path, monkeypatch)
    settings["sources"][0]["path"] = str(tmp_path / "verses.txt")
    (tmp_path / "verses.txt").write_text("VERSES\nOne.\nTwo.\nThree.\n")
    settings |= {"tokenizer": {"kind": "bytes"}, "split": {"validation_fraction": 0}}
    corpus = write_corpus_file(tmp_path / "corpus.yaml", **settings, bytes_per_unit=10)
    done = run("data-pipeline", "build", corpus)
    assert done.returncode == 0, done.stderr
    parts = [pq.read_table(path) for path in sorted((tmp_path / "corpus/documents").iterdir())]
    assert [part["text"].to_pylist() for part in parts] == [["ONE."], ["TWO.", "THREE."]]
    assert parts[1]["id"].to_pylist() == ["verses/verses.txt/000000002", "verses/verses.txt/000000003"]
    assert open_corpus(tmp_path / "corpus").manifest.config["packages"] == ["my_package 1.0"]
    assert subprocess.check_output([sys.executable, "-c", TOGETHER], text=True) == "3\n"

    source = {"format": "c4", "path": str(tmp_path / "verses.txt")}
    other = write_corpus_file(tmp_path / "other.yaml", sources=[source])
    done = run("data-pipeline", "documents", other, "--strict")
    assert "declared as c4, but looks like a file of verses (format: verses)" in done.stderr
