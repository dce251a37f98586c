"""The files that a source's path names: none is silently skipped, and each is read once, checksum included."""

import bz2
import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from data_pipeline.base.errors import UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.stores import Checksum
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.engine.context import Context
from data_pipeline.sources.decompress import open_stream
from data_pipeline.sources.record import Range
from data_pipeline.stages import documents, inputs, report
from data_pipeline.stages.documents import DocumentsSpec
from data_pipeline.stages.inputs import InputFile, inputs_of, list_inputs, shared
from data_pipeline.stages.pipeline import build
from tests.support.builds import OFF, documents_of, plain
from tests.support.tables import each


def names(path: Path | str) -> list[str]:
    return [file.name for file in list_inputs(SourceConfig(format="text", path=str(path))).files]


def write(folder: Path, *files: str) -> None:
    """Each file has its name as its content."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(file)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a, sub/b, and link, which leads to a directory elsewhere with c and deep/e."""
    write(tmp_path, "in/a", "in/sub/b", "elsewhere/c", "elsewhere/deep/e")
    (tmp_path / "in/link").symlink_to("../elsewhere")
    return tmp_path / "in"


@each(
    "below, expected",
    [
        ("", ["a", "link/c", "link/deep/e", "sub/b"]),
        ("/*", ["a", "link/c", "link/deep/e", "sub/b"]),
        ("/**", ["a", "link/c", "link/deep/e", "sub/b"]),
        ("/*/[bc]", ["link/c", "sub/b"]),
        ("/**/e", ["link/deep/e"]),
        ("/link", ["c", "deep/e"]),
        ("/sub/b", ["b"]),
    ],
)
def test_a_directory_stands_for_all_files_below_it_and_so_does_a_link_to_one(folder, below, expected):
    assert names(f"{folder}{below}") == expected


@each("name", ["[1] a.jsonl", "a*b", "a::b", "[d]/c"])
def test_a_path_that_exists_is_that_file_whatever_its_characters(tmp_path, name):
    write(tmp_path, name, "1", "other")
    (found,) = list_inputs(SourceConfig(format="text", path=str(tmp_path / name))).files
    assert found.name == Path(name).name
    with open_stream(found.path) as stream:
        assert stream.read().decode() == name
    assert len(names(tmp_path)) == 3


def test_paths_that_are_no_file_or_may_not_be_listed_and_a_link_to_a_directory_above_it_are_named(folder, monkeypatch):
    def refused(message: str, *places: str) -> None:
        for below in places:
            with pytest.raises(UserError, match=message):
                names(f"{folder}{below}")

    (folder / "sub/loop").symlink_to(folder)
    refused(r"sub/loop.*: links to a directory above itself", "", "/*", "/**/a")
    (folder / "sub/loop").unlink()
    (folder / "gone").symlink_to("nowhere")
    refused("in/gone: links to nowhere, which doesn't exist", "", "/*")
    (folder / "gone").unlink()
    os.mkfifo(folder / "pipe")
    refused("in/pipe: expected a file or a directory", "", "/*")
    (folder / "pipe").unlink()
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9")).write_text("")
    refused(r"in/caf\\xe9: the name isn't UTF-8", "")
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=PermissionError))
    refused("in: no permission to list this directory", "")


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """As an ordinary user: nothing is closed to root."""
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


@each(
    "closed, mode, paths",
    [
        ("in/sub", 0o000, ["in", "in/*", "in/**", "in/**/*.txt", "in/*/b.txt", "in/sub", "in/sub/b.txt"]),
        ("in", 0o644, ["in", "in/*", "in/a.txt"]),  # its files can be listed, but not read
        ("in", 0o311, ["in", "in/*.txt"]),  # they can be read, but not listed
    ],
)
def test_a_closed_directory_is_named_and_not_skipped(closed, mode, paths):
    with tempfile.TemporaryDirectory() as top:  # pytest's own is closed to others
        Path(top).chmod(0o755)
        write(Path(top), "in/a.txt", "in/sub/b.txt")
        Path(top, closed).chmod(mode)
        try:
            for path in paths:
                with without_privileges(), pytest.raises(UserError) as refused:
                    names(f"{top}/{path}")
                assert str(refused.value) == f"{top}/{closed}: no permission to list this directory"
            if mode == 0o311:
                with without_privileges():
                    assert names(f"{top}/in/a.txt") == ["a.txt"]
        finally:
            Path(top, closed).chmod(0o755)


@each("scheme", ["", "file://"])
@each("below", ["", "/*", "/**", "/**/*.txt"])
def test_outputs_of_builds_below_a_source_are_left_out_in_one_line(tmp_path, capsys, below, scheme):
    """The output of this build, a finished corpus whose stages were removed, and one that was begun."""
    data = tmp_path / "data"
    written = ["out/documents/part-0.txt", "deep/done/manifest.json", "deep/done/blocks.parquet", "deep/done/a.txt"]
    write(data, "a.txt", "deep/b.txt", "out-of-corpora/c.txt", *written, "begun/.stages/a.txt", "begun/d/a.txt")
    source = SourceConfig(format="text", path=f"{data}{below}")
    found = [file.name for file in list_inputs(source, output=f"{scheme}{data}/out").files]
    assert found == ["a.txt", "deep/b.txt", "out-of-corpora/c.txt"]
    (line,) = capsys.readouterr().err.splitlines()
    built = 4 if below.endswith("txt") else 6
    told = f"{data}/begun, {data}/deep/done, {data}/out"
    assert line == f"{data}{below}: left out {built} files of corpora that were built there ({told})"


def test_an_output_in_the_folder_of_its_source_reads_nothing_that_a_build_wrote(tmp_path, capsys):
    write(tmp_path, "a.txt", "manifests/b.txt", "documents/part-0.txt", ".stages/x/y.txt", "manifest.json")
    source = SourceConfig(format="text", path=str(tmp_path))
    assert [file.name for file in list_inputs(source, output=str(tmp_path)).files] == ["a.txt", "manifests/b.txt"]
    assert "left out 3 files" in capsys.readouterr().err


CLONE = [".a.txt.swp", ".git/config", ".git/objects/b.txt", "sub/.ipynb_checkpoints/c.txt"]


@each(
    "below, expected, hidden",
    [
        ("", ["a.txt", "sub/c.txt"], [".a.txt.swp", ".git", "sub/.ipynb_checkpoints"]),
        ("/*", ["a.txt", "sub/c.txt"], [".a.txt.swp", ".git", "sub/.ipynb_checkpoints"]),
        ("/**/*.txt", ["a.txt", "sub/c.txt"], [".git", "sub/.ipynb_checkpoints"]),
        ("/sub", ["c.txt"], [".ipynb_checkpoints"]),
        # what the path itself names
        ("/.git", ["config", "objects/b.txt"], []),
        ("/.a.txt.swp", [".a.txt.swp"], []),
        ("/*/.ipynb_checkpoints", ["sub/.ipynb_checkpoints/c.txt"], []),
    ],
)
@each("store", ["", "memory://"])
def test_hidden_files_are_no_inputs_unless_they_are_named(tmp_path, below, expected, hidden, store):
    write(tmp_path / "in", "a.txt", "sub/c.txt", *CLONE)
    if store:
        fsspec.filesystem("memory").put(str(tmp_path / "in"), str(tmp_path / "in"), recursive=True)
    source = SourceConfig(format="text", path=f"{store}{tmp_path}/in{below}")
    found = list_inputs(source)
    assert [file.name for file in found.files] == expected
    assert found.hidden == hidden
    if below in ("", "/*"):
        everything = list_inputs(source.model_copy(update={"hidden": True}))
        assert [file.name for file in everything.files] == sorted(["a.txt", "sub/c.txt", *CLONE])
        assert everything.hidden == []


def test_a_source_of_hidden_files_alone_says_so_and_a_closed_hidden_folder_closes_nothing(tmp_path):
    write(tmp_path, ".cache/a.txt")
    reason = (
        r"has nothing but 1 hidden file or folder \(.cache\); to read hidden files, set `hidden: true` in the source"
    )
    with pytest.raises(UserError, match=reason):
        names(tmp_path)
    with tempfile.TemporaryDirectory() as top:  # pytest's own is closed to others
        Path(top).chmod(0o755)
        write(Path(top), "in/a.txt", "in/.trash/b.txt")
        Path(top, "in/.trash").chmod(0)
        try:
            with without_privileges():
                assert [names(f"{top}/in{below}") for below in ("", "/*", "/**/*.txt")] == 3 * [["a.txt"]]
        finally:
            Path(top, "in/.trash").chmod(0o755)


def test_the_report_counts_hidden_files_in_one_line(tmp_path, capsys):
    write(tmp_path / "in", "a.txt", *CLONE)
    config = plain(tmp_path, tmp_path / "in", "text", dedup=OFF)
    for hidden in (3, 4):
        build(config, "documents")
        assert (
            f"source 'text': left out {hidden} hidden files or folders (.a.txt.swp, .git, " in capsys.readouterr().err
        )
        assert report.read(config.output).hidden_inputs == hidden
        page = (tmp_path / "corpus/report.md").read_text()
        assert page.count(f"Hidden files and folders left out: {hidden}.") == 1
        write(tmp_path / "in", ".z")  # no unit changes
    assert len(documents_of(tmp_path / "corpus")) == 1


def test_a_source_that_no_file_system_opens_is_one_line():
    """Also for commands that list sources before a build: `plan` and `trace`."""
    with pytest.raises(UserError, match=r"^nosuch://a/b: can't be read: Protocol not known: nosuch"):
        list_inputs(SourceConfig(format="text", path=["nosuch://a/b"]))


def test_documents_of_a_corpus_are_read_where_they_are_named(tmp_path):
    parts = ["one/documents/part-0.txt", "two/documents/part-0.txt"]
    write(tmp_path, *parts, "one/manifest.json", "one/blocks.parquet")
    assert names(tmp_path / "one/documents") == ["part-0.txt"]
    assert names(tmp_path / "*/documents/*") == parts
    shutil.rmtree(tmp_path / "two")
    with pytest.raises(UserError, match="has nothing but 3 files of corpora that were built there"):
        names(tmp_path)


@each("size", [10, 100_000])
def test_a_changed_file_of_the_same_size_and_time_is_known_by_its_head_middle_and_tail(tmp_path, size):
    def stamp(content: bytes, seconds: float = 1e9) -> str:
        (tmp_path / "a.txt").write_bytes(content)
        os.utime(tmp_path / "a.txt", (1e9, seconds))
        (found,) = list_inputs(SourceConfig(format="text", path=str(tmp_path / "a.txt"))).files
        return found.stamp

    whole = bytearray(b"a" * size)
    stamps = {stamp(whole)}
    for place in (0, size // 2, size - 1):
        whole[place] = ord("b")
        stamps.add(stamp(whole))
    assert len(stamps) == 4
    assert stamp(whole) in stamps
    assert stamp(whole, 1e9 + 1) not in stamps


class Server(MemoryFileSystem):
    """A server whose files have paths without its address, as with SFTP, FTP and HDFS."""

    protocol = "server"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        inside = path.partition("://")[2].partition("/")[2] if "://" in path else path
        return super()._strip_protocol(inside)


@each(
    "url, path, file, expected",
    [
        ("sftp://me:pw@host/data/a", "/data/a", "/data/a", "sftp://me:pw@host/data/a"),
        ("sftp://host/*", "/*", "/a", "sftp://host/a"),
        ("sftp://host/data/", "/data", "/data/a", "sftp://host/data/a"),
        ("abfs://data@account/data", "data/data", "data/data/a", "abfs://data@account/data/a"),
        ("abfs://data@account", "data", "data/a", "abfs://data@account/a"),
        ("s3://bucket/*/a", "bucket/*/a", "bucket/b/a", "s3://bucket/b/a"),
        ("memory://b", "/b", "/b/a", "memory://b/a"),
        ("https://host/b/", "https://host/b/", "https://host/b/a", "https://host/b/a"),
        ("zip://*::file:///a.zip", "*", "a", ""),
    ],
)
def test_the_url_of_a_file_has_the_address_of_its_source(url, path, file, expected):
    assert inputs._url_of(file, url, path) == expected


def test_files_of_a_server_are_read_where_they_were_found():
    fsspec.register_implementation("server", Server, clobber=True)
    fsspec.filesystem("memory").pipe_file("/server/a.txt", b"A text.")
    (found,) = list_inputs(SourceConfig(format="text", path="server://me@host/server/*.txt")).files
    assert found.path == "server://me@host/server/a.txt"
    with open_stream(found.path) as stream:
        assert stream.read() == b"A text."


@each("key", ["Last-Modified", "etag", "last_modified", "modify", "modificationTime"])
def test_a_replaced_remote_file_of_the_same_size_is_known_by_what_its_store_lists(monkeypatch, key):
    """HTTP, Azure, FTP and WebHDFS; of a server that lists no more than sizes, nothing is known."""
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/stamps/{key}", b"a")
    info, stamps = memory.info(f"/stamps/{key}"), []
    for listed in ({}, {key: "yesterday"}, {key: "today"}, {key: "today", "ETag": "1"}):
        monkeypatch.setattr(inputs, "_remote_files", lambda *_, listed=listed: {info["name"]: {**info, **listed}})
        (found,) = list_inputs(SourceConfig(format="text", path=f"memory://stamps/{key}")).files
        stamps.append(found.stamp)
    assert stamps == ["", "yesterday", "today", "1"]


def test_no_password_or_token_of_a_url_is_kept_or_shown(tmp_path, capsys):
    """Neither in records, reports and warnings nor in the ids of documents."""
    url = "memory://me:hunter2@host/texts/{}?token=hunter2"
    for name, text in (("a.csv", "text\nA text.\n"), ("b.csv", "words\nA text.\n")):
        fsspec.filesystem("memory").pipe_file(url.format(name).removeprefix("memory:/"), text.encode())
    sources = [{"format": "csv", "path": [url.format("a.csv"), url.format("b.csv")]}]
    build(plain(tmp_path, "", "csv", sources=sources, dedup=OFF), "documents")
    told = capsys.readouterr().err
    assert "csv/b.csv?token=***: unreadable at the start: memory://me:***@host/texts/b.csv?token=***" in told
    assert [one["id"] for one in documents_of(tmp_path / "corpus")] == ["csv/a.csv?token=***/000000000"]
    kept = [path for path in (tmp_path / "corpus").rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert (kept, "hunter2" in told) == ([], False)


def groups(sizes: dict[str, list[int]], **settings: int) -> list[list[int]]:
    """The sizes of the files that share a unit; `sizes` are those of the files of each source."""
    sources = [SourceConfig(format="text", path=name, name=name) for name in sizes]
    files = [
        InputFile(source, "", str(number), size, "")
        for source in sources
        for number, size in enumerate(sizes[source.name])
    ]
    config = CorpusConfig(name="x", output="x", sources=sources, **settings)
    return [[file.bytes for file in group] for group in shared(files, config)]


@each(
    "sizes, expected",
    [
        ([5000, 5000, 6000], [[5000, 5000], [6000]]),  # at most 10,000 bytes together
        ([9000, 20_000, 500, 500], [[9000], [20_000], [500, 500]]),  # a large file is alone, and the order stays
        ([1, 1, 1], [[1, 1], [1]]),  # opening a file counts as 4,096 bytes
        ([10_001], [[10_001]]),
    ],
)
def test_small_neighbours_share_a_unit(sizes, expected):
    assert groups({"a": sizes}, bytes_per_shared_unit=10_000) == expected
    assert groups({"a": sizes, "b": sizes}, bytes_per_shared_unit=10_000) == 2 * expected  # a unit has one source
    assert groups({"a": sizes}, bytes_per_shared_unit=0) == [[size] for size in sizes]


def test_files_come_in_the_order_of_the_ids_of_their_documents(tmp_path):
    """What shares a unit is a stretch of ids: of equal documents, deduplication keeps the one with the smallest."""
    write(tmp_path, "a", "a-b", "a.c", "b/d", "b-e")
    ids = [f"text/{name}/000000000" for name in names(tmp_path)]
    assert ids == sorted(ids)
    assert len(ids) == 5


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
    config = plain(folder, path, declared, dedup=OFF)
    (unit,) = documents.plan(config, LocalStore(folder), inputs_of(config).files)
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
    (result,) = documents.write_documents(Context(LocalStore(tmp_path)), spec).inputs
    assert result.status == status
    assert (result.bytes, result.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert len(content) <= sum(read_bytes) <= len(content) + (1 << 18) + (1 << 20)


def test_the_first_range_of_a_file_has_the_checksum_of_all_of_it(tmp_path):
    stream = bz2.compress(b"<mediawiki><page></page>")
    (tmp_path / "dump.bz2").write_bytes(3 * stream)
    whole = spec_of(tmp_path, str(tmp_path / "dump.bz2"), "wikipedia")
    read = []
    for part in (Range(0, len(stream)), Range(len(stream), None, 1)):
        spec = replace(whole, inputs=[replace(whole.inputs[0], range=part)], part=f"part-{part.start}")
        read += documents.write_documents(Context(LocalStore(tmp_path)), spec).inputs
    first, last = read
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
