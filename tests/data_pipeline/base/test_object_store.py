"""Sources and corpora on a real S3 server that breaks off in the middle of a body and answers 503, and the bounded disk
cache that processes share, through which a remote corpus is read."""

import bz2
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data_pipeline.base import stores
from data_pipeline.base.errors import DamagedInput, StoreError, StoreUnavailable, UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.open_store import open_store
from data_pipeline.config import SourceConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.corpus import default_directory
from data_pipeline.corpus.verify import verify
from data_pipeline.engine.context import Context
from data_pipeline.loading import reader
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import TrainingBatches, validation_batches
from data_pipeline.loading.prefetch import Lookahead
from data_pipeline.loading.reader import DiskCache
from data_pipeline.loading.stream import Stream, StreamState
from data_pipeline.sources.record import Range
from data_pipeline.sources.wikipedia_export import ranges
from data_pipeline.stages import documents
from data_pipeline.stages.inputs import files_of, list_files
from data_pipeline.stages.output import is_begun
from tests.conftest import write_corpus_file
from tests.support.builds import built, flip, plain
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.mounts import mounted
from tests.support.object_store import ObjectStore, copy_corpus, forget_filesystems, new_fork_server, serving
from tests.support.tables import each


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        for store in serving(patch):
            new_fork_server(patch)
            patch.setattr(stores, "_FIRST_PAUSE", 0.01)
            yield store


@pytest.fixture
def store(server) -> ObjectStore:
    server.calm()
    return server


@pytest.fixture(scope="module")
def copied(small_corpus, server) -> str:
    """The URL of a copy of the small corpus."""
    server.calm()
    url = "s3://bucket/copied"
    copy_corpus(small_corpus, server, url)
    return url


def test_verify_reads_a_copy_through_faults_and_names_damage_there(small_corpus, copied, store):
    name = "shards/train/shard-00000.tar"
    content = bytearray((small_corpus / name).read_bytes())
    content[700] ^= 1
    store.filesystem().pipe_file(f"bucket/copied/{name}", bytes(content))
    done = run_here("data-pipeline", "verify", copied)
    problem, way_out = done.stderr.splitlines()
    assert done.returncode == 1
    assert problem.startswith(f"error: {copied}/{name}: sha256 differs")
    assert "damaged blocks start at rows 0" in problem
    assert way_out.endswith("or, if this is a copy, copy these files again")
    store.filesystem().put_file(str(small_corpus / name), f"bucket/copied/{name}")
    store.faults = True
    assert "agree with the manifest" in done_here("data-pipeline", "verify", copied)
    assert store.busy
    assert store.broken


def test_a_store_that_goes_away_is_known_while_a_batch_is_left(copied, store, tmp_path):
    """Two batches are needed to know that there is a third; the first is whole, and resuming continues after it."""
    corpus = open_corpus(copied, tmp_path, wait_seconds=0.05)
    stream, layout = Stream([corpus], [1.0], 0, 1), BatchLayout(0, 1, 64, 1)
    ahead = Lookahead(TrainingBatches(stream, layout).loader(8, 0))
    taken = [next(ahead)[0]]
    store.away = True
    while ahead.lost is None:
        taken.append(next(ahead)[0])
    assert 0 < len(taken) < 8
    gone = r"s3://bucket/copied/shards/.*: unavailable for \d+ s: .*run the same"
    with pytest.raises(StoreUnavailable, match=gone):
        [next(ahead) for _ in range(2)]
    store.calm()
    state = StreamState.at(stream, 64 * len(taken), [])
    rest = [step[0] for step in TrainingBatches(stream, layout, state).loader(8 - len(taken), 0)]
    whole = [step[0] for step in TrainingBatches(stream, layout).loader(8, 0)]
    for found, wanted in zip([*taken, *rest], whole, strict=True):
        assert torch.equal(found["labels"], wanted["labels"])


def test_a_copy_without_documents_is_a_corpus_once_its_manifest_is_there(small_corpus, tmp_path):
    url = f"file://{tmp_path}/there"
    left_out = shutil.ignore_patterns(".stages", "documents", "manifest.json")
    shutil.copytree(small_corpus, tmp_path / "there", ignore=left_out)
    with pytest.raises(UserError, match=rf"{tmp_path}/there/manifest.json: no such file"):
        open_corpus(url, tmp_path / "cache")
    shutil.copy(small_corpus / "manifest.json", tmp_path / "there")
    assert verify(open_corpus(url, tmp_path / "cache")) == []


@pytest.mark.slow
def test_a_build_from_there_is_the_local_one_to_the_byte(small_corpus, store, tmp_path):
    for path in small_corpus.parent.glob("*.json.gz"):
        store.filesystem().put_file(str(path), f"bucket/in/{path.name}")
    sources = [{"format": "c4", "path": "s3://bucket/in/*.json.gz", "language": "en"}]
    store.faults = True
    built(write_corpus_file(tmp_path / "corpus.yaml", sources=sources))
    assert store.busy
    assert store.broken
    found, wanted = (json.loads((one / "manifest.json").read_text()) for one in (tmp_path / "corpus", small_corpus))
    for key in ("fingerprint", "splits", "lineage", "tokenizer"):
        assert found[key] == wanted[key]


def listed(path: str) -> list:
    return list_files(SourceConfig(format="text", path=path))


def test_a_listing_has_names_sizes_and_etags(store):
    filesystem = store.filesystem()
    for name in ("a.txt", "deep/b.txt", "deep/c.md"):
        filesystem.pipe_file(f"bucket/listed/{name}", name.encode())
    store.faults = True
    files = listed("s3://bucket/listed")
    assert [(file.name, file.bytes) for file in files] == [("a.txt", 5), ("deep/b.txt", 10), ("deep/c.md", 9)]
    assert [file.name for file in listed("s3://bucket/listed/*/*.txt")] == ["deep/b.txt"]
    (one,) = listed("s3://bucket/listed/a.txt")
    assert one.stamp == files[0].stamp
    store.faults = False
    filesystem.pipe_file("bucket/listed/a.txt", b"a.TXT")  # as long as before
    assert listed("s3://bucket/listed")[0].stamp != one.stamp


def test_objects_that_stand_for_folders_are_no_inputs(store):
    """As consoles ("a/") and Hadoop ("a_$folder$") write them."""
    for name in ("", "one.txt", "sub/", "sub/two.txt", "sub_$folder$", "named/", "named/three.txt"):
        content = b"a text" if name.endswith(".txt") else b""
        store.filesystem().call_s3("put_object", Bucket="bucket", Key=f"marked/{name}", Body=content)
    everything = ["named/three.txt", "one.txt", "sub/two.txt"]
    for below in ("", "/", "/*", "/**"):
        assert [file.name for file in listed(f"s3://bucket/marked{below}")] == everything


def test_checking_the_index_of_a_dump_reads_a_few_bytes_at_each_of_its_cuts(store):
    """And once the usual 4 MB, for the first stream, whose pages are counted. Ten streams of half a megabyte follow."""
    text = random.Random(0).randbytes(500_000).hex()
    dump, index = bz2.compress(b"<mediawiki>\n"), ""
    for page in range(11):
        index += f"{len(dump)}:{page}:Page {page}\n"
        dump += bz2.compress(f"<page><title>Page {page}</title>{text if page else ''}</page>\n".encode())
    for name, content in (("a.xml.bz2", dump), ("index.txt.bz2", bz2.compress(index.encode()))):
        store.filesystem().pipe_file(f"bucket/dumps/{name}", content)
    store.sent = 0
    cut = ranges("s3://bucket/dumps/a.xml.bz2", "s3://bucket/dumps/index.txt.bz2", 400_000)
    assert len(cut) == 10
    assert len(dump) > 5_000_000
    assert store.sent < stores.READ_AHEAD + 500_000


def test_an_object_with_the_name_of_a_pattern_is_that_object(store):
    for name in ("[1].jsonl", "1.jsonl", "[d]/a*b", "[d]/ab"):
        store.filesystem().pipe_file(f"bucket/literal/{name}", name.encode())
    for name in ("[1].jsonl", "[d]/a*b"):
        (found,) = listed(f"s3://bucket/literal/{name}")
        assert found.path == f"s3://bucket/literal/{name}"
    assert [file.name for file in listed("s3://bucket/literal/[d]")] == ["a*b", "ab"]
    assert [file.name for file in listed("s3://bucket/literal/[12].jsonl")] == ["1.jsonl"]


def test_a_build_takes_no_folder_of_a_bucket_that_has_files_of_the_user(store, tmp_path):
    for name in (
        "mine/documents/part-0.parquet",
        "mine/notes.txt",
        "begun/.stages/claims/00000001",
        "begun/documents/a",
    ):
        store.filesystem().pipe_file(f"bucket/{name}", b"a text")
    assert is_begun(open_store("s3://bucket/begun"))
    assert not is_begun(open_store("s3://bucket/new"))
    for output, source, said in (
        ("mine", "begun", "output: s3://bucket/mine has documents, which no build has written"),
        ("new", "new", "s3://bucket/new: no such file"),
        ("min", "mine/*.txt", ""),
        ("mine/a", "mine/*.txt", ""),
        (
            "mine/documents",
            "mine",
            "output: s3://bucket/mine/documents holds s3://bucket/mine/documents/part-0.parquet",
        ),
    ):
        config = plain(tmp_path, f"s3://bucket/{source}", "text", output=f"s3://bucket/{output}")
        if said:
            with pytest.raises(UserError, match=f"^{said}"):
                files_of(config)
        else:
            assert [file.name for file in files_of(config)] == ["notes.txt"]


@each(
    "path, message",
    [
        ("s3://no-such-bucket/x", "s3://no-such-bucket/x: there is no bucket 'no-such-bucket'"),
        ("s3://no-such-bucket/*.gz", "there is no bucket 'no-such-bucket'"),
        ("s3://bucket/nothing", "s3://bucket/nothing: no such file"),
        ("s3://bucket/nothing/*.gz", r"s3://bucket/nothing/\*.gz: no such file"),
    ],
)
def test_a_source_that_is_not_there_is_one_line(store, path, message):
    with pytest.raises(UserError, match=message) as error:
        listed(path)
    assert error.value.exit_code == 2


def test_no_permission_and_no_credentials_are_one_line(store, tmp_path, monkeypatch):
    store.denied = True
    with pytest.raises(StoreError, match=r"^s3://bucket/in: permission denied: AccessDenied: Access Denied$"):
        listed("s3://bucket/in")
    with pytest.raises(StoreError, match=r"^s3://bucket/x/manifest.json: permission denied"):
        open_corpus("s3://bucket/x", tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    forget_filesystems()
    told = refused_here(2, "data-pipeline", "verify", "s3://bucket/x")
    forget_filesystems()
    assert told.startswith("error: s3://bucket/x/manifest.json: no credentials: set AWS_ACCESS_KEY_ID")


def documents_spec(path: str) -> documents.DocumentsSpec:
    return documents.DocumentsSpec(
        inputs=[documents.InputSpec(path, "a.txt", Range())],
        **{"format": "text", "name": "text", "language": "en", "options": {}, "part": "part-00000"},
        **{"split": (0, 1), "folder": "documents", "urls": False, "characters_per_part": 10**6},
        rules=[],
        dropped="",
    )


def test_a_bucket_that_vanishes_ends_the_unit_and_a_missing_object_is_damage(store, tmp_path):
    filesystem = store.filesystem()
    filesystem.mkdir("vanishing")
    filesystem.pipe_file("vanishing/a.txt", b"line\n" * (stores.READ_AHEAD // 2))
    with stores.open_file("s3://vanishing/a.txt") as file:
        assert file.read(5) == b"line\n"
        filesystem.rm("vanishing", recursive=True)
        with pytest.raises(StoreError, match=r"^s3://vanishing/a.txt: there is no bucket 'vanishing'$"):
            file.read()
    with pytest.raises(StoreError, match="there is no bucket 'vanishing'"):
        documents.write_documents(Context(LocalStore(tmp_path)), documents_spec("s3://vanishing/a.txt"))
    assert not list(tmp_path.rglob("*.parquet"))
    (result,) = documents.write_documents(
        Context(LocalStore(tmp_path)), documents_spec("s3://bucket/removed.txt")
    ).inputs
    assert result.status == "unreadable"  # as a missing file is
    assert "no such file" in result.damage[0].reason


def test_a_store_that_refuses_all_objects_ends_the_unit(store, tmp_path):
    """The credentials may have expired: then the store refuses to list the objects, too."""
    store.filesystem().pipe_file("bucket/expired/a.txt", b"line\n")
    store.denied = True
    with pytest.raises(StoreError, match=r"^s3://bucket/expired/a.txt: permission denied"):
        documents.write_documents(Context(LocalStore(tmp_path)), documents_spec("s3://bucket/expired/a.txt"))


def test_a_file_that_kills_its_readers_is_unreadable_and_the_file_beside_it_is_kept(tmp_path):
    spec = documents_spec("a.txt")
    (tmp_path / "b.txt").write_text("Kept.")
    spec = replace(spec, inputs=[*spec.inputs, documents.InputSpec(str(tmp_path / "b.txt"), "b.txt", Range())])
    result = documents.write_documents(
        Context(LocalStore(tmp_path)), documents.without(spec, "a.txt", "the worker died")
    )
    assert [(one.status, one.documents) for one in result.inputs] == [("unreadable", 0), ("ok", 1)]
    assert result.inputs[0].damage[0].reason == "the worker died"


def test_a_full_disk_of_temporary_files_is_named_and_not_that_of_the_corpus(store, tmp_path):
    """A remote Parquet file is copied to this machine first: 1 MB, where 64 kB are free."""
    pq.write_table(pa.table({"text": [random.Random(0).randbytes(500_000).hex()]}), tmp_path / "a.parquet")
    store.filesystem().put_file(str(tmp_path / "a.parquet"), "bucket/copied/a.parquet")
    sources = [{"format": "parquet", "path": "s3://bucket/copied/a.parquet"}]
    config = write_corpus_file(tmp_path / "corpus.yaml", sources=sources)
    command = ["env", f"TMPDIR={tmp_path}/disk", sys.executable, "-m", "data_pipeline", "documents", str(config)]
    done = mounted(tmp_path / "disk", "size=64k", command, tmp_path / "errors")
    said = f"error: {tmp_path}/disk: No space left on device; what is finished is kept"
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, said)


def test_an_object_that_is_replaced_while_it_is_read_is_refused(store):
    filesystem = store.filesystem()
    filesystem.pipe_file("bucket/replaced", b"a" * (2 * stores.READ_AHEAD))
    with stores.open_file("s3://bucket/replaced") as file:
        file.read(5)
        filesystem.pipe_file("bucket/replaced", b"b" * (2 * stores.READ_AHEAD))
        with pytest.raises(StoreError, match="s3://bucket/replaced: was replaced while it was read"):
            file.read()


def test_a_store_that_does_not_answer_is_waited_for_and_then_named(store, capsys, monkeypatch):
    """Pauses of 0.2, 0.4, 0.8, … and 12.8 s; the next would last until after 40 s."""
    waited: list[float] = []
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.2)
    clock = SimpleNamespace(monotonic=lambda: 100 + sum(waited), sleep=waited.append)
    monkeypatch.setattr(stores, "time", clock)
    store.away = True
    with pytest.raises(
        StoreUnavailable, match=r"s3://bucket/x\S*: unavailable for 25 s: .*run the same command"
    ) as error:
        stores.with_retries(lambda: store.filesystem().info("bucket/x"), "s3://bucket/x?token=hidden", 40.0)
    assert error.value.exit_code == 75
    assert waited == [0.2 * 2**number for number in range(7)]
    assert capsys.readouterr().err.count("warning: s3://bucket/x?token=***: ") == 1


# ---- the cache


def test_batches_of_a_remote_corpus_are_those_of_a_local_one(small_corpus, tmp_path):
    cache = tmp_path / "cache"
    remote, local = open_corpus(f"file://{small_corpus}", cache), open_corpus(small_corpus)
    assert remote.fingerprint == local.fingerprint
    assert local.rows("train") < 128 * 45  # more than an epoch
    for workers in (0, 2):
        pairs = [
            TrainingBatches(Stream([corpus], [1.0], 0, 8), BatchLayout(0, 1, 128, 1)).loader(45, workers)
            for corpus in (remote, local)
        ]
        for (found,), (wanted,) in zip(*pairs, strict=True):
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    layout = BatchLayout(0, 1, 8, 1)
    for found, wanted in zip(validation_batches(remote, layout), validation_batches(local, layout), strict=True):
        assert torch.equal(found["labels"], wanted["labels"])
    blocks = list((cache / "blocks").glob("??/*"))
    assert len(blocks) == sum(len(local.blocks(split).rows) for split in ("train", "validation"))
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in blocks)


@each("url, said", [("zip://::file:///nothing.zip", "no such file"), ("no-such-protocol://corpus", "can't be read")])
def test_a_remote_corpus_that_is_not_there_is_one_line(tmp_path, url, said):
    with pytest.raises(UserError, match=rf"manifest.json: {said}"):
        open_corpus(url, tmp_path / "cache")


def test_damage_on_the_other_side_is_named(small_corpus, tmp_path):
    copy = shutil.copytree(small_corpus, tmp_path / "copy")
    flip(copy / "shards/train/shard-00000.tar", 700)
    corpus = open_corpus(f"file://{copy}", tmp_path / "cache")
    with pytest.raises(DamagedInput, match=r"file://.*train/shard-00000.tar.*sha256 differs"):
        list(TrainingBatches(Stream([corpus], [1.0], 0, 8), BatchLayout(0, 1, 128, 1)).loader(45, 0))


def content(number: int) -> bytes:
    return bytes([number % 256]) * 1000


def digest(number: int) -> str:
    return hashlib.sha256(content(number)).hexdigest()


def cached_in(folder: Path) -> dict[str, int]:
    """The bytes of each file of a cache, by name."""
    return {path.name: path.stat().st_size for path in folder.glob("??/*")}


def test_the_cache_stays_within_its_limit_and_keeps_what_was_used_last(tmp_path):
    cache, probe = DiskCache(tmp_path / "cache", limit=10_000), tmp_path / "probe"
    probe.touch()

    def used(number: int) -> None:
        assert cache.get(digest(number), lambda: content(number)) == content(number)
        before = probe.stat().st_mtime_ns
        while probe.stat().st_mtime_ns == before:  # the file system's clock is coarse
            probe.touch()

    for number in range(40):
        used(number)
        used(0)  # again and again
        assert sum(path.stat().st_size for path in cache.directory.rglob("*") if path.is_file()) <= 10_000
    fetched = []
    for number in (0, 39, 1):
        cache.get(digest(number), lambda number=number: fetched.append(number) or content(number))
    assert fetched == [1]


def test_a_file_of_most_of_the_limit_takes_the_place_of_the_one_before(tmp_path):
    cache = DiskCache(tmp_path, limit=10_000)
    for number in range(5):
        data = content(number) * 6
        assert cache.get(hashlib.sha256(data).hexdigest(), lambda data=data: data) == data
        assert list(cached_in(tmp_path).values()) == [6000]


def test_a_cached_file_of_other_content_is_replaced(tmp_path):
    cache = DiskCache(tmp_path, limit=10_000)
    cache.get(digest(1), lambda: content(1))
    for other in (b"", content(2)):  # as a full disk may leave it, and as a bad one
        (tmp_path / digest(1)[:2] / digest(1)).write_bytes(other)
        assert cache.get(digest(1), lambda: content(1)) == content(1)


def test_a_cached_file_on_a_shared_file_system_is_read_not_mapped(tmp_path, monkeypatch):
    """Another node may delete the file, and a mapped file that is gone kills the process."""
    monkeypatch.setattr(reader, "_OWN_DISKS", set())
    cache, fetched = DiskCache(tmp_path, limit=10_000), []
    contents = [cache.get(digest(1), lambda: fetched.append(1) or content(1)) for _ in range(2)]
    assert contents == [content(1)] * 2
    assert fetched == [1]
    assert [type(one.obj) for one in contents] == [bytes, bytes]


def test_the_default_cache_is_on_the_nodes_disk_and_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    directory = default_directory()
    assert directory == tmp_path / f"encdec-pretrain-{os.getuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda owner=os.getuid(): owner + 1)
    (tmp_path / f"encdec-pretrain-{os.getuid()}").mkdir()  # made by somebody else
    with pytest.raises(UserError, match=r"data\.cache\.directory: .* belongs to another user"):
        default_directory()


def test_a_cache_that_cannot_be_written_is_named_once_and_not_used(tmp_path, capsys):
    (tmp_path / "file").touch()
    cache = DiskCache(tmp_path / "file", limit=10_000)
    assert [cache.get(digest(1), lambda: content(1)) for _ in range(2)] == [content(1)] * 2
    assert capsys.readouterr().err == f"warning: {tmp_path}/file: blocks can't be cached: Not a directory\n"


def test_the_loaders_of_a_machine_keep_the_limit_together(tmp_path):
    """64 loaders, each of which stores a block in turn."""
    caches = [DiskCache(tmp_path, limit=200_000) for _ in range(64)]
    for number in range(400):
        data = number.to_bytes(2, "big") * 500
        caches[number % 64].get(hashlib.sha256(data).hexdigest(), lambda data=data: data)
        if number % 10 == 9:
            assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 200_000
    assert len(list(tmp_path.glob("??/*"))) >= 180  # a tenth goes at a time


@each("others, room", [(92_000, True), (94_500, False)])
def test_the_cache_leaves_a_twentieth_of_the_disk_free(tmp_path, capsys, monkeypatch, others, room):
    """A disk of 100 kB; other programs use a part."""
    cache = DiskCache(tmp_path, limit=10**9)

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(total=100_000, free=100_000 - others - sum(cached_in(tmp_path).values()))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for number in range(20):
        assert cache.get(digest(number), lambda number=number: content(number)) == content(number)
        assert usage(tmp_path).free >= 5000
        assert (digest(number) in cached_in(tmp_path)) is room
    said = f"warning: {tmp_path}: blocks can't be cached: less than 5% of the disk is free\n"
    assert capsys.readouterr().err == ("" if room else said)


@each("error, room", [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_a_full_disk_makes_the_cache_smaller_and_another_error_does_not(tmp_path, capsys, monkeypatch, error, room):
    """A disk that takes five files, although it has free bytes: no inodes are left, or the user's quota is used up."""
    cache, write = DiskCache(tmp_path, limit=10**9), reader._write

    def limited(path: Path, data: bytes) -> None:
        if len(cached_in(tmp_path)) >= 5:
            raise OSError(error, os.strerror(error))
        write(path, data)

    monkeypatch.setattr(reader, "_write", limited)
    for number in range(20):
        assert cache.get(digest(number), lambda number=number: content(number)) == content(number)
        assert (digest(number) in cached_in(tmp_path)) is (room or number < 5)
    said = f"warning: {tmp_path}: blocks can't be cached: {os.strerror(error)}\n"
    assert capsys.readouterr().err == ("" if room else said)


# a cache that may have more than its disk; the most of the disk that is used, and which of the last blocks are there
SMALL_DISK = """
import hashlib, shutil, sys
from pathlib import Path
from data_pipeline.loading.reader import DiskCache

folder = Path(sys.argv[1])
cache, most = DiskCache(folder / "cache", limit=10**9), 0
for number in range(int(sys.argv[2])):
    content = number.to_bytes(4, "big") * 4096
    assert cache.get(hashlib.sha256(content).hexdigest(), lambda: content) == content
    disk = shutil.disk_usage(folder)
    most = max(most, 1 - disk.free / disk.total)
stored = [(cache.directory / name[:2] / name).exists() for name in (
    hashlib.sha256(one.to_bytes(4, "big") * 4096).hexdigest() for one in range(number - 9, number + 1))]
print(f"{most} {sum(stored)}")
"""


@each("options, blocks", [("size=4m", 600), ("size=64m,nr_inodes=600", 600)])
def test_a_cache_on_a_disk_smaller_than_its_limit_makes_room(tmp_path, options, blocks):
    """600 blocks of 16 KiB on 4 MiB, of which 5 % stay free; and on a disk that is full while it has free bytes."""
    command = [sys.executable, "-c", SMALL_DISK, str(tmp_path / "disk"), str(blocks)]
    done = mounted(tmp_path / "disk", options, command, tmp_path / "errors")
    assert (done.returncode, done.stderr) == (0, "")
    most, stored = map(float, done.stdout.split())
    assert most <= 0.95
    assert stored == 10


def test_a_disk_that_others_have_filled_is_left_alone(tmp_path):
    fill = f'head -c 3900k /dev/zero > {tmp_path}/disk/others; exec "$0" "$@"'
    command = ["sh", "-c", fill, sys.executable, "-c", SMALL_DISK, str(tmp_path / "disk"), "20"]
    done = mounted(tmp_path / "disk", "size=4m", command, tmp_path / "errors")
    warning = f"warning: {tmp_path}/disk/cache: blocks can't be cached: less than 5% of the disk is free\n"
    assert (done.returncode, done.stderr) == (0, warning)
    assert done.stdout.split()[1] == "0"


SHARE = """
import hashlib, sys
from pathlib import Path
from data_pipeline.loading.reader import DiskCache

cache = DiskCache(Path(sys.argv[1]), limit=20_000)
for turn in range(300):
    content = bytes([turn * int(sys.argv[2]) % 50]) * 1000
    assert cache.get(hashlib.sha256(content).hexdigest(), lambda: content) == content
"""


@pytest.mark.slow
def test_processes_share_a_cache_that_is_too_small_for_them(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", SHARE, tmp_path, str(step)]) for step in (1, 3, 7)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 20_000
