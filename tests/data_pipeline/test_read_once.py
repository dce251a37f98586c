"""Each input is read once: its checksum is computed from what its reader reads."""

import bz2
import gzip
import hashlib
import json
import random
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile

from data_pipeline.foundation.checksums import Checksum
from data_pipeline.sources.record import Range
from data_pipeline.stages import documents
from data_pipeline.stages.documents import DocumentsSpec
from tests.data_pipeline.pages import OFF, plain
from tests.tables import each

SIZE = 6_000_000  # several times what is read at once


@pytest.fixture
def read_bytes(monkeypatch) -> list[int]:
    """The sizes of all reads of the store in memory."""
    sizes: list[int] = []

    def read(file: MemoryFile, size: int | None = -1) -> bytes:
        data = BytesIO.read(file, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(MemoryFile, "read", read, raising=False)
    return sizes


@pytest.fixture(scope="module")
def lines() -> list[str]:
    chance = random.Random(1)
    return [f"{chance.randbytes(2000).hex()} is no word, but a line." for _ in range(SIZE // 4000)]


def spec_of(folder: Path, path: str, declared: str) -> DocumentsSpec:
    (unit,) = documents.plan(plain(folder, path, declared, dedup=OFF), folder)
    return unit.spec


def pages(lines: list[str]) -> bytes:
    return "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()


def parquet(lines: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    columns = {"text": lines, "url": [line[:500] for line in lines], "not read": [line[::-1] for line in lines]}
    pq.write_table(pa.table(columns), sink, row_group_size=400, compression=None)
    return sink.getvalue().to_pybytes()


@each(
    "declared, make, status",
    [
        ("text", lambda lines: "\n".join(lines).encode(), "ok"),
        ("jsonl", pages, "ok"),
        ("c4", lambda lines: gzip.compress(pages(lines), 1), "ok"),
        ("c4", lambda lines: gzip.compress(pages(lines), 1)[: -SIZE // 8], "damaged"),
        ("jsonl", lambda lines: bz2.compress(pages(lines[: len(lines) // 4]), 1), "ok"),
        ("parquet", parquet, "ok"),
        ("text", lambda lines: b"", "unreadable"),
    ],
)
def test_the_checksum_takes_no_second_read(tmp_path, lines, read_bytes, declared, make, status):
    """At a store, where Parquet too is read from start to end. Its first bytes are looked at before, up to 1.3 MB."""
    content = make(lines)
    fsspec.filesystem("memory").pipe_file("/once/input", content)
    spec = spec_of(tmp_path, "memory:///once/input", declared)
    read_bytes.clear()
    (result,) = documents.write_documents(tmp_path, spec).inputs
    assert result.status == status
    assert (result.bytes, result.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert len(content) <= sum(read_bytes) <= len(content) + (1 << 18) + (1 << 20)


def test_the_first_range_of_a_file_has_the_checksum_of_all_of_it(tmp_path):
    stream = bz2.compress(b"<mediawiki><page></page>")
    (tmp_path / "dump.bz2").write_bytes(3 * stream)
    whole = spec_of(tmp_path, str(tmp_path / "dump.bz2"), "wikipedia")
    first, last = (
        documents.write_documents(
            tmp_path, replace(whole, inputs=[replace(whole.inputs[0], range=found)], part=f"part-{found.start}")
        ).inputs[0]
        for found in (Range(0, len(stream)), Range(len(stream), None, 1))
    )
    assert (first.bytes, first.sha256) == (3 * len(stream), hashlib.sha256(3 * stream).hexdigest())
    assert (last.bytes, last.sha256) == (0, "")


def test_bytes_behind_a_gap_are_read_again_and_no_byte_counts_twice(tmp_path):
    content = bytes(range(100))
    (tmp_path / "file").write_bytes(content)
    checksum = Checksum(str(tmp_path / "file"))
    for start, stop in ((90, 100), (0, 20), (5, 30), (10, 20), (40, 60), (30, 40)):
        checksum.update(start, content[start:stop])
    assert checksum.finish() == (100, hashlib.sha256(content).hexdigest())
    assert Checksum(str(tmp_path / "none")).finish() == (0, "")
