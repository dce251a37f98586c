"""Sources and corpora on a real S3 server that breaks off in the middle of a body and answers 503."""

import bz2
import hashlib
import json
import os
import random
import shutil
import sys
from dataclasses import replace
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
from data_pipeline.corpus.verify import verify
from data_pipeline.engine.context import Context
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import TrainingBatches, validation_batches
from data_pipeline.loading.prefetch import Lookahead
from data_pipeline.loading.stream import Stream, StreamState
from data_pipeline.sources.record import Range
from data_pipeline.sources.wikipedia_export import ranges
from data_pipeline.stages import documents
from data_pipeline.stages.inputs import inputs_of, list_inputs
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
    return list_inputs(SourceConfig(format="text", path=path)).files


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
                inputs_of(config)
        else:
            assert [file.name for file in inputs_of(config).files] == ["notes.txt"]


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
