"""Files in another format than the declared one and damaged files are never read silently: messages name them."""

import gzip
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checks.fuzz import check, seeds
from data_pipeline.config import SourceConfig
from data_pipeline.execution.work_units import Finished
from data_pipeline.foundation.errors import FailedError
from data_pipeline.pipeline import report_damage
from data_pipeline.sources.formats import READERS
from data_pipeline.stages.documents import DocumentsResult, plan, write_documents
from tests.conftest import DATA
from tests.data_pipeline.pages import plain
from tests.tables import each

FORMATS = get_args(SourceConfig.model_fields["format"].annotation)
JSON_FORMATS = ("jsonl", "json", "c4", "wikiextractor")

# For each kind of file: its content, the formats that read it, and its name in messages.
FILES: dict[str, tuple[bytes | Path, tuple[str, ...], str]] = {
    "wet": (DATA / "commoncrawl/whirlwind.warc.wet.gz", ("wet",), "a WARC archive"),
    "warc": (DATA / "commoncrawl/whirlwind.warc.gz", ("warc",), "a WARC archive"),
    "c4": (DATA / "c4/olmo-c4-sample.01.json.gz", JSON_FORMATS, "JSON Lines with the keys "),
    "wikipedia": (DATA / "wikipedia/nlwiki-20140927.xml", ("wikipedia",), "a MediaWiki export"),
    "wikiextractor": (b'<doc id="1" url="u" title="A">\nA\n\nB.\n</doc>\n', ("wikiextractor",), "WikiExtractor output"),
    "jsonl": (b'{"text": "A", "id": 3}\n' * 2, JSON_FORMATS, "JSON Lines with the keys text, id"),
    "text": (b"One line of text.\nAnother, \xc3\xa9.\n", ("text",), "plain text (format: text)"),
    "parquet": (b"", ("parquet",), "a Parquet file (format: parquet)"),
    "pairs": (b"a house\tein Haus\n", ("pairs", "text"), "tab-separated pairs (format: pairs)"),
    "pairs in JSON": (b'{"inputs": "a", "targets": "b"}\n' * 2, ("pairs",), "JSON Lines with the keys inputs, targets"),
    "pairs in UTF-16": ("a house\tein Haus\n".encode("utf-16"), (), "binary data or UTF-16"),
    "other keys": (b'{"content": "A"}\n' * 2, (), "JSON Lines with the keys content"),
    "JSON array": (b'[\n{"text": "a"},\n{"text": "b"}\n]\n', ("json", "text"), "one JSON array, not JSON Lines"),
    "CSV": (b'text,url\na,b\n"c\nd",e\n', ("csv", "text"), "plain text"),
    "xz": (b"\xfd7zXZ\0\0\4\xe6", (), "an xz archive: decompress it with xz -d"),
    "zip": (b"PK\x03\x04\x14" + bytes(99), (), "an archive of files: unpack it"),
    "PDF": (b"%PDF-1.7\n" + bytes(99), (), "a PDF: convert it to text"),
    "tar": (b"a.txt".ljust(257, b"\0") + b"ustar\x0000", (), "a tar archive: unpack it with tar -xf"),
    "HTML": (b"<!DOCTYPE html>\n<p>404</p>\n\t<p>.</p>\n", ("text",), "an HTML page"),
}


def read_as(declared: str, path: Path) -> Finished[DocumentsResult]:
    """The result of the documents stage for one file."""
    corpus = path.parent / "corpus"
    rows = {"packing": "complete_documents", "objective": {"name": "text_to_text"}} if declared == "pairs" else {}
    (unit,) = plan(plain(path.parent, path, declared, rows=rows), corpus)
    return Finished(unit.name, "", write_documents(corpus, unit.spec), {}, 0.0, 0.0)


def write(kind: str, path: Path) -> Path:
    content = FILES[kind][0]
    if kind == "parquet":
        pq.write_table(pa.table({"text": ["a", "b"]}), path)
    else:
        path.write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    return path


@each("kind", FILES)
def test_a_file_is_read_as_what_it_is_and_refused_as_anything_else(tmp_path, kind):
    _, readable, name = FILES[kind]
    for declared in FORMATS:
        done = read_as(declared, write(kind, tmp_path / "a"))
        if declared in readable:
            assert done.result.inputs[0].status == "ok", declared
            assert sum(done.result.documents.values()) > 0
        else:
            assert done.result.inputs[0].status == "unreadable", declared
            assert not done.result.documents
            assert name in done.result.inputs[0].damage[0].reason
            with pytest.raises(FailedError) as failure:
                report_damage([done], strict=False)
            first, last = str(failure.value).splitlines()
            assert first.startswith(f"{declared}/a: unreadable at ")
            assert last == f"nothing could be read from source {declared}"


@each(
    "declared, line, lacks, way_out",
    [
        ("jsonl", '{"id": "7", "content": "A text."}', "text", "{text: content}"),
        ("jsonl", '{"meta": {"a key": "A text."}}', "text", '{text: "meta.a key"}'),
        ("json", '{"id": "7", "doc": {"text": "A text."}}', "text", "{text: doc.text}"),
        ("jsonl", '{"id": "7", "text": {"body": "A text."}}', "text", "{text: text.body}"),
        ("pairs", '{"question": "Who?", "n": 1, "answer": "I."}', "inputs", "{inputs: question, targets: answer}"),
        ("pairs", '{"inputs": "Who?", "long answer": "I."}', "targets", '{inputs: inputs, targets: "long answer"}'),
    ],
)
def test_a_wrong_key_is_answered_with_the_options_to_set(tmp_path, declared, line, lacks, way_out):
    (tmp_path / "a").write_text(f"{line}\n" * 2)
    with pytest.raises(FailedError) as failure:
        report_damage([read_as(declared, tmp_path / "a")], strict=False)
    first, last = str(failure.value).splitlines()
    advice = f'no string under the key "{lacks}"; for other keys set options: {way_out}'
    assert first.startswith(f"{declared}/a: unreadable at line 1: {advice}; it looks like JSON Lines with the keys ")
    assert last == f"nothing could be read from source {declared}"


CUT = bytearray(gzip.compress(b'{"text": "One text."}\n' * 9))
CUT[-6] ^= 1


@each(
    "declared, content, end",
    [
        # a key that is there, and no other string
        *(
            ("jsonl", line * 2, "ext, id")
            for line in (b'{"text": null, "id": "7"}\n', b'{"text": "\\ud800", "id": "7"}\n')
        ),
        ("jsonl", b'{"id": 7}\n' * 2, "keys id"),
        ("wet", b"\xff\xfe\xfa" * 9, "; are its path and format right?"),
        ("jsonl", CUT, "9 records left out, as far as they can be counted, with all that follows in the file"),
    ],
)
def test_no_options_are_advised_where_they_would_not_help(tmp_path, declared, content, end):
    (tmp_path / "a").write_bytes(content)
    (damage, *_) = read_as(declared, tmp_path / "a").result.inputs[0].damage
    assert "options" not in damage.reason
    assert end in damage.reason


def test_an_archive_that_holds_nothing_yet_is_no_wrong_one(tmp_path):
    info = b"WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 1\r\n\r\nx\r\n\r\n"
    (tmp_path / "a").write_bytes(info)
    assert read_as("wet", tmp_path / "a").result.inputs[0].status == "ok"


def test_damaged_input_crashes_no_reader_and_is_never_lost_silently():
    for seed, number in [(7, 619), (7, 31856), *((1, number) for number in range(500))]:
        check(seed, number)
    tables = {"arrow", "csv"}  # read as Parquet is; their damage is that of test_table_sources.py
    assert {seed.format for seed in seeds()} == {*READERS} - tables
