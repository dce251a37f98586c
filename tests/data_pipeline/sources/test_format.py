"""The formats of installed packages: all that a shipped format can do."""

import json
import subprocess
import sys

import pyarrow.parquet as pq

from tests.conftest import run, write_corpus_file
from tests.support.runs import install

VERSES = """
from data_pipeline.sources.format import Beginning, Format
from data_pipeline.sources.record import Range, Record


class Verses(Format):
    beginning, divisible = Beginning(rb"VERSES", "a file of verses"), True

    @staticmethod
    def read(file, stats):
        with open(file.path.removeprefix("file://"), "rb") as lines:
            lines.seek(file.start)
            for number, line in enumerate(lines.read(-1 if file.stop is None else file.stop - file.start).splitlines()):
                if not line.startswith(b"VERSES"):
                    stats.counters.read += 1
                    yield Record(file.first_ordinal + number, line.decode())

    @staticmethod
    def ranges(file, target_bytes):
        with open(file.path.removeprefix("file://"), "rb") as lines:
            cut = len(lines.readline() + lines.readline())
        return [Range(0, cut), Range(cut, None, 2)]

    @staticmethod
    def text_of(record, holes=None):
        holes["verse"] += 1
        return record.text.upper()

    @staticmethod
    def stays_together(options):
        return 3
"""
TOGETHER = "from data_pipeline.config import SourceConfig; print(SourceConfig(format='verses', path='a').together)"


def test_format_of_a_package_is_divided_converted_and_recognised(tmp_path, monkeypatch):
    (tmp_path / "verses.py").write_text(VERSES)
    install(monkeypatch, tmp_path, "verses", {"encdec_pretrain.sources": {"verses": "verses:Verses"}})
    (tmp_path / "a.verses").write_text("VERSES\nOne.\nTwo.\nThree.\n")
    source = {"format": "verses", "path": str(tmp_path / "a.verses")}
    corpus = write_corpus_file(tmp_path / "corpus.yaml", sources=[source], bytes_per_unit=5)
    done = run("data-pipeline", "documents", corpus)
    assert done.returncode == 0, done.stderr
    parts = [pq.read_table(path) for path in sorted((tmp_path / "corpus/documents").iterdir())]
    assert [part["text"].to_pylist() for part in parts] == [["ONE."], ["TWO.", "THREE."]]
    assert parts[1]["id"].to_pylist() == ["verses/a.verses/000000002", "verses/a.verses/000000003"]
    assert json.loads((tmp_path / "corpus/report.json").read_text())["template_holes"] == {"verse": 3}
    assert subprocess.check_output([sys.executable, "-c", TOGETHER], text=True) == "3\n"

    other = write_corpus_file(tmp_path / "other.yaml", sources=[{**source, "format": "c4"}])
    done = run("data-pipeline", "documents", other, "--strict")
    assert "declared as c4, but looks like a file of verses (format: verses)" in done.stderr
