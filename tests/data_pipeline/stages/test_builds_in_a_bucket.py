"""Corpora built on a real S3 server, with nothing on a shared disk: the bytes of a folder, whatever fails."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError

from data_pipeline.base import object_store, stores
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError, NodeUnfit, StoreError, StoreUnavailable, UserError
from data_pipeline.base.object_store import ObjectStore as Bucket
from data_pipeline.base.open_store import open_store
from data_pipeline.base.safetensors_file import Arrays, write_arrays
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import in_corpus
from data_pipeline.dedup import keys
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import MergeSpec
from data_pipeline.engine.records import Records
from data_pipeline.engine.work_units import Finished, Result
from data_pipeline.stages.inputs import WRITTEN
from data_pipeline.stages.pipeline import build
from tests.conftest import write_c4, write_corpus_file
from tests.data_pipeline.engine.test_cluster import Node, can_unshare, cluster
from tests.support.builds import OFF, trained, with_fault
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.object_store import ObjectStore, serving
from tests.support.tables import each

URL = "s3://bucket/corpora/c4"
OF_ONE_BUILD = re.compile(r"report\.|\.stages/(claims|complete|config|timings|failures|plans|driver|workers)|finished")


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with pytest.MonkeyPatch.context() as patch:
        for store in serving(patch):
            patch.setattr(stores, "_FIRST_PAUSE", 0.01)
            # drivers look once a second, and one that is late on a busy machine loses nothing
            patch.setattr(object_store, "LEASE_SECONDS", 60.0)
            patch.setattr(object_store, "_LOOKS", 60)
            yield store


@pytest.fixture
def store(server) -> ObjectStore:
    server.calm()
    return server


@pytest.fixture(scope="module")
def file(small_corpus, tmp_path_factory) -> Path:
    """Four files of pages of which many are there twice, several buckets in every stage, and its own small model."""
    folder = tmp_path_factory.mktemp("bucket")
    for part in range(4):
        write_c4(folder / f"c4-{part}.json.gz", records=12, skip=8 * part)
    dedup = {"urls": "newest", "lines": True, "documents": True, "minhash": True, "keys_per_bucket": 100}
    return write_corpus_file(folder / "corpus.yaml", dedup=dedup, tokenizer=trained(small_corpus))


@pytest.fixture(scope="module")
def in_folder(file) -> dict[str, str]:
    return contents(build(load(file, [], CorpusConfig)))


def contents(location: str) -> dict[str, str]:
    """The sha256 of each file that is a function of the config and the input alone."""
    corpus = open_store(location)
    names = [name for name in corpus.names() if not OF_ONE_BUILD.search(name)]
    return {name: hashlib.sha256(corpus.get(name)).hexdigest() for name in names}


def objects(store: ObjectStore, folder: str = "bucket/corpora/c4") -> dict[str, Any]:
    return store.filesystem().find(folder, detail=True)


@pytest.fixture(scope="module")
def in_bucket(file, in_folder, server) -> subprocess.CompletedProcess[str]:
    """A build of the same corpus at URL, under a bucket's usual policy: objects may be listed, read, written and
    deleted, but unfinished uploads may not be listed."""
    server.calm()
    server.denied = "uploads"
    return run_here("data-pipeline", "build", file, f"output={URL}")


def test_a_build_in_a_bucket_has_the_bytes_of_one_in_a_folder(in_folder, in_bucket, store):
    assert f"{URL} is complete" in in_bucket.stdout
    assert contents(URL) == in_folder
    assert {name.split("/")[0] for name in in_folder} >= {"documents", "shards", "tokenizer", "manifest.json"}


def test_a_finished_build_in_a_bucket_is_not_done_again_and_writes_its_claim_alone(file, in_bucket, store, monkeypatch):
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 1e6)  # no renewal
    told = done_here("data-pipeline", "build", file, f"output={URL}")
    assert "to do" not in told
    assert store.asked["PUT"] == 3  # the claim, the same again, which is to be refused, and its end
    assert store.asked["POST"] == 0


def test_commands_take_the_url(in_bucket, in_folder, file, store):
    folder = load(file, [], CorpusConfig).output
    assert "agree with the manifest" in done_here("data-pipeline", "verify", URL)
    shown = [done_here("data-pipeline", "show", one, "-n", "2").split("Next")[0] for one in (folder, URL)]
    assert shown[0] == shown[1]
    (identity,) = re.findall(r"documents: (\S+)[,.]", shown[1])[:1]
    for command in (["stats"], ["trace", identity.rstrip(",")]):
        of_both = [done_here("data-pipeline", command[0], one, *command[1:]) for one in (folder, URL)]
        if command[0] == "trace":
            assert of_both[0] == of_both[1]
        else:
            assert of_both[0].splitlines()[:3] == of_both[1].splitlines()[:3]


def test_damage_in_a_bucket_is_found_and_repaired_to_the_byte(in_bucket, in_folder, file, store):
    names = ["documents/part-00001.parquet", "shards/train/shard-00000.tar", ".stages/tokens/part-00000.safetensors"]
    for name in names:
        content = bytearray(open_store(URL).get(name))
        content[len(content) // 2] ^= 1
        store.filesystem().pipe_file(f"bucket/corpora/c4/{name}", bytes(content))
    told = run_here("data-pipeline", "verify", URL)
    assert told.returncode == 1
    for name in names[:2]:  # those of a corpus, without the files of its build
        assert f"{URL}/{name}: sha256 differs" in told.stderr
    assert "--repair" in told.stderr
    printed = done_here("data-pipeline", "build", file, f"output={URL}", "--repair")
    for name in names:
        assert f"{URL}/{name}: damaged, will be rebuilt" in printed
    assert contents(URL) == in_folder


def test_a_missing_file_is_made_again_and_no_other(in_bucket, in_folder, file, store):
    store.filesystem().rm_file("bucket/corpora/c4/documents/part-00002.parquet")
    told = done_here("data-pipeline", "build", file, f"output={URL}")
    assert "deduplicated: 1 unit to do (output missing or cut), 3 up to date" in told
    assert contents(URL) == in_folder


def test_a_second_build_is_refused_while_the_first_is_alive_and_takes_over_when_it_is_gone(store, monkeypatch, capsys):
    first, second = Bucket("s3://bucket/claims"), Bucket("s3://bucket/claims")
    token = first.begin()
    with pytest.raises(
        FailedError, match=r"s3://bucket/claims: another build is at work on it \(host .*, process \d+\)"
    ):
        second.claim()
    first._ended.set()  # as if its process were killed
    with first.at_work(token), first.put("a") as path:
        path.write_bytes(b"first")
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 1.0)
    second.claim()
    monkeypatch.undo()
    assert "waiting up to 1 s for a sign" in capsys.readouterr().err
    assert second.begin() != token
    with pytest.raises(NodeUnfit, match="another build has taken over"), Bucket("s3://bucket/claims").at_work(token):
        raise AssertionError
    with pytest.raises(NodeUnfit, match="another build has taken over"):
        first.append("finished.jsonl", b"{}\n", [])
    second.write("manifest.json", b"of the second")
    late = [lambda: first.write("manifest.json", b"of the first"), lambda: first.delete(["manifest.json"])]
    for change in (*late, lambda: first.delete_folder(""), lambda: first.remove_leftovers(WRITTEN)):
        with pytest.raises(NodeUnfit, match="another build has taken over"):
            change()
    first.release()
    assert second.get("manifest.json") == b"of the second"
    second.release()
    third = Bucket("s3://bucket/claims")
    third.claim()
    assert capsys.readouterr().err == ""  # it waited for nobody
    third.release()


def test_one_of_the_drivers_that_claim_at_the_same_time_has_the_corpus(store):
    drivers, told = [Bucket("s3://bucket/at-once") for _ in range(6)], list[str]()

    def claim(driver: Bucket) -> None:
        try:
            driver.claim()
        except FailedError as error:
            told.append(str(error))

    threads = [threading.Thread(target=claim, args=[driver]) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 5
    for driver in drivers:
        driver.release()


@each(
    "fault, url, told",
    [
        ({}, "s3://nowhere/c4", "there is no bucket 'nowhere'"),
        ({"denied": "PUT"}, "s3://bucket/denied", "permission denied: AccessDenied.*a build lists, reads, writes and"),
        ({"unconditional": True}, "s3://bucket/plain", "If-None-Match.*build in a folder, then copy its files"),
        ({}, "memory://corpus", "expected a path, or a URL of an object store"),
    ],
)
def test_a_store_that_cannot_have_a_build_is_refused_in_one_line_before_any_work(file, store, fault, url, told):
    for name, value in fault.items():
        setattr(store, name, value)
    (line,) = refused_here(2, "data-pipeline", "build", file, f"output={url}").strip().splitlines()
    assert re.search(f"^error: .*{re.escape(url)}.*{told}", line)
    store.calm()
    if url.startswith("s3://bucket"):
        assert objects(store, url.removeprefix("s3://")) == {}


@each(
    "url, left",
    [
        ("s3://bucket/given-up", ["given-up/other/a", "given-up-too/shards/b", "shards/c", "texts/d"]),
        ("s3://bucket", ["given-up-too/shards/b", "given-up/other/a", "given-up/shards/a.tar", "texts/d"]),
    ],
)
def test_uploads_that_were_given_up_are_removed_from_the_folders_of_the_corpus_alone(store, url, left):
    """A corpus may be the whole bucket, where other programs upload other files."""
    client = store.filesystem()
    for key in ("given-up/shards/a.tar", "given-up/other/a", "given-up-too/shards/b", "shards/c", "texts/d"):
        client.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    Bucket(url).remove_leftovers(WRITTEN)
    assert sorted(upload["Key"] for upload in client.list_multipart_uploads("bucket")) == sorted(left)
    for upload in client.list_multipart_uploads("bucket"):
        client.call_s3("abort_multipart_upload", Bucket="bucket", Key=upload["Key"], UploadId=upload["UploadId"])


def test_an_upload_that_has_ended_meanwhile_is_as_good_as_removed(store, monkeypatch):
    corpus = Bucket("s3://bucket/ended")
    monkeypatch.setattr(corpus, "_uploads", lambda: iter([{"Key": "ended/shards/a.tar", "UploadId": "of no upload"}]))
    monkeypatch.setattr(stores, "WAIT_SECONDS", 0.0)
    corpus.remove_leftovers(WRITTEN)


def test_a_file_is_sent_anew_if_the_answer_to_the_end_of_its_upload_was_lost(store, monkeypatch):
    """s3fs asks for the end again, and S3 no longer knows the upload. Another driver may have taken over meanwhile."""
    corpus, sent, looked = Bucket("s3://bucket/lost"), list[str](), list[int]()
    send = corpus._filesystem.put_file

    def lost_once(path: str, target: str, **options: Any) -> None:
        send(path, target, **options)
        sent.append(target)
        if len(sent) == 1:
            answer = {"Error": {"Code": "NoSuchUpload"}, "ResponseMetadata": {"HTTPStatusCode": 404}}
            raise FileNotFoundError("no such upload") from ClientError(answer, "CompleteMultipartUpload")

    monkeypatch.setattr(corpus._filesystem, "put_file", lost_once)
    monkeypatch.setattr(corpus, "_check_claim", lambda: looked.append(len(sent)))
    with corpus.put("a") as path:
        path.write_bytes(b"content")
    assert (corpus.get("a"), len(sent), looked) == (b"content", 2, [0, 1])


def test_a_build_needs_no_permission_for_unfinished_uploads(in_bucket):
    assert in_bucket.returncode == 0
    (line,) = [line for line in in_bucket.stderr.splitlines() if line.startswith("note: ")]
    assert line.startswith(f"note: {URL}: permission denied: AccessDenied: Access Denied; unfinished")


def test_one_object_that_its_store_refuses_is_an_unreadable_input_until_the_store_sends_it(store, tmp_path):
    for name in "abc":
        write_c4(tmp_path / f"{name}.json.gz", records=5, skip=5 * ord(name))
        store.filesystem().put_file(str(tmp_path / f"{name}.json.gz"), f"bucket/texts/{name}.json.gz")
    source = {"format": "c4", "path": "s3://bucket/texts/*.json.gz", "language": "en"}
    config = write_corpus_file(tmp_path / "corpus.yaml", sources=[source])
    store.denied = "/bucket/texts/b.json.gz"
    done = run_here("data-pipeline", "documents", config)
    assert done.returncode == 0, done.stderr
    unreadable = r"c4/b.json.gz: unreadable at the start: s3://bucket/texts/b.json.gz: permission denied: .*"
    assert re.search(f"^warning: {unreadable}$", done.stderr, re.MULTILINE)
    strict = run_here("data-pipeline", "documents", config, "--strict")
    assert strict.returncode == 1
    assert re.search(f"^error: {unreadable}$", strict.stderr, re.MULTILINE)
    store.calm()
    again = done_here("data-pipeline", "documents", config)
    assert "documents: 1 unit to do (files to read again), 2 up to date" in again
    assert "documents: 3 of 3 units up to date" in done_here("data-pipeline", "documents", config)


def test_a_claim_that_another_driver_gives_up_at_the_same_moment_is_claimed_again(store, monkeypatch):
    corpus, there = Bucket("s3://bucket/given-up"), [True]
    create = corpus._create
    monkeypatch.setattr(corpus, "_create", lambda *claim: not there.pop() if there else create(*claim))
    corpus.claim()
    corpus.release()


def test_a_store_that_goes_away_after_a_claim_says_so_and_the_claim_ends(store, monkeypatch):
    def away(names: list[str]) -> None:
        raise StoreUnavailable("s3://bucket/ended: unavailable")

    former, corpus = Bucket("s3://bucket/ended"), Bucket("s3://bucket/ended")
    former.begin()
    former.release()
    monkeypatch.setattr(corpus, "delete", away)  # of the former claim
    with pytest.raises(StoreUnavailable, match="unavailable"):
        corpus.claim()
    corpus.release()
    again = Bucket("s3://bucket/ended")
    again.claim()  # without waiting for a lease to end, which takes a minute here
    again.release()


def test_the_scratch_of_a_worker_that_was_killed_is_removed_by_the_next(store, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as ended:
        pass
    of_ended, of_another = (tmp_path / f"{object_store._SCRATCH}{pid}.x" for pid in (ended.pid, os.getppid()))
    for folder in (of_ended, of_another):
        folder.mkdir()
    corpus = Bucket("s3://bucket/scratch")
    with corpus.at_work(corpus.begin()), corpus.put("a") as path:
        path.write_bytes(b"a")
        assert path.is_relative_to(tmp_path)
    corpus.release()
    assert [*tmp_path.iterdir()] == [of_another]
    assert corpus.get("a") == b"a"


def test_the_lines_of_a_bucket_are_those_of_a_folder(store, tmp_path):
    """Also of a writer that was killed between its new lines and the removal of the old ones."""
    for corpus in (open_store(tmp_path), Bucket("s3://bucket/lines")):
        corpus.claim()
        assert list(corpus.lines("stage/finished.jsonl")) == []
        corpus.append("stage/finished.jsonl", b"1\n2\n", [])
        corpus.append("stage/finished.jsonl", b"3\n", [])
        assert list(corpus.lines("stage/finished.jsonl")) == [b"1", b"2", b"3"]
        corpus.replace_lines("stage/finished.jsonl", b"2\n")
        corpus.append("stage/finished.jsonl", b"4\n", [])
        assert list(corpus.lines("stage/finished.jsonl")) == [b"2", b"4"]
        corpus.release()
    corpus.write("stage/finished.jsonl/00000001", b"1\n")
    assert list(Bucket("s3://bucket/lines").lines("stage/finished.jsonl")) == [b"2", b"4"]


def test_a_folder_that_is_not_there_takes_one_listing_and_so_do_the_records_of_a_stage(store, monkeypatch):
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 1e6)  # no renewal
    corpus = Bucket("s3://bucket/asked")
    assert corpus.names("nothing") == corpus.names("nothing", deep=False) == corpus.folders("nothing") == []
    assert store.asked == {"LIST": 3}
    corpus.claim()
    store.asked.clear()
    records = Records(corpus, "stage")
    assert records.read(Finished[Result]) == {}
    records.remove({"unit"})
    assert store.asked == {"LIST": 1}
    with records as add:
        add(Finished("unit", "", Result(), {}, 0.0, 0.0))
    assert store.asked == {"LIST": 1, "GET": 2, "PUT": 1}  # this driver's claim, and none that is newer
    assert [*records.read(Finished[Result])] == ["unit"]
    assert store.asked == {"LIST": 1, "GET": 3, "PUT": 1}
    corpus.release()


def test_a_worker_looks_for_its_driver_once_in_a_while_and_not_for_each_unit(store, monkeypatch):
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 1e6)
    corpus = Bucket("s3://bucket/looking")
    token = corpus.begin()
    store.asked.clear()
    for _ in range(3):
        with corpus.at_work(token):
            corpus.write("a", b"a")
    assert store.asked == {"GET": 2, "PUT": 3}  # its claim, and none that is newer
    corpus.write(".stages/claims/00000002", b"{}")
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 0.0)  # that was a while ago
    with pytest.raises(NodeUnfit, match="another build has taken over"), corpus.at_work(token):
        raise AssertionError
    corpus.release()


def test_small_files_take_one_request_and_the_tokenizer_none_but_those_of_its_files(store, small_corpus):
    """Tables, arrays and the tokenizer, whose size nobody asks for and whose folder nobody lists."""
    corpus, rows = Bucket("s3://bucket/small"), pa.table({"a": ["b"] * 100})
    with corpus.put("a.parquet") as path:
        pq.write_table(rows, path)
    with corpus.put("a.safetensors") as path:
        write_arrays(path, {"a": np.arange(9, dtype=np.uint64)})
    for file in ("spiece.model", "spiece.vocab"):
        corpus.write(f"tokenizer/{file}", (small_corpus / "tokenizer" / file).read_bytes())
    store.asked.clear()
    assert pq.read_table(corpus.readable("a.parquet")) == rows
    assert corpus.checksum("a.parquet")[1] == corpus.written("a.parquet")[1]
    assert store.asked == {"GET": 2}
    arrays = Arrays(corpus, "a.safetensors")
    assert [*arrays["a"]] == [*range(9)]
    assert [*arrays.slices(("a", 2, 4))[0]] == [2, 3]
    assert store.asked == {"GET": 3}
    assert in_corpus(corpus, "sentencepiece", [], 20).vocab_size == open_corpus(small_corpus).tokenizer.vocab_size
    assert store.asked == {"GET": 4}


def test_ranges_that_are_near_each_other_take_one_request(store):
    corpus, content = Bucket("s3://bucket/ranges"), np.random.default_rng(0).bytes(2_000_000)
    corpus.write("a", content)
    near, far = corpus.least_read, corpus.least_read + 1
    for ranges, requests in (
        ([(0, 10), (10 + near, 20 + near)], 1),
        ([(0, 10), (10 + far, 20 + far)], 2),
        ([(50, 60), (0, 55), (3, 3), (1_999_990, 2_000_050)], 2),  # in any order; empty ones, and beyond the end
        ([], 0),
    ):
        store.asked.clear()
        assert corpus.ranges("a", ranges) == [content[start:stop] for start, stop in ranges]
        assert store.asked["GET"] == requests


def test_a_bucket_of_hashes_takes_two_requests_a_file_and_a_unit_that_merges_one_more_for_each_range(
    store, monkeypatch
):
    """The index of a file comes with its header. The files of a bucket are larger than what is read with it."""
    corpus, chance = Bucket("s3://bucket/slices"), np.random.default_rng(0)
    for number in range(4):
        found = keys.Keys(1, 1)
        found.extend(np.column_stack([chance.integers(0, 2**64, 30_000, np.uint64)] * 3))
        with corpus.put(f"keys/{number}") as path:
            found.write(path, 4096)
        places = np.sort(chance.integers(0, 2**40, 60_000, np.uint64))
        with corpus.put(f"duplicates/{number}") as path:
            keys.write_duplicates(path, np.arange(60_000, dtype=np.uint64) % 8, places, 8, kept=places)
    names = [f"keys/{number}" for number in range(4)]
    monkeypatch.setattr(keys, "_KEYS_AT_ONCE", 40_000)  # 120,000 keys, in four ranges: the first comes with the header
    for spec, work, requests in (
        (MergeSpec(tuple(names), 0, "merged"), keys.merge_keys, 4 * (1 + 3)),
        (MergeSpec(tuple(f"duplicates/{number}" for number in range(4)), 0, "few"), keys.merge_duplicates, 4 * 2),
    ):
        store.asked.clear()
        work(Context(corpus), spec)
        assert store.asked["GET"] == requests
    store.asked.clear()
    (apart, units), (merged, of_merged) = (keys.KeyBucket(2, 4).read(corpus, files) for files in (names, ["merged"]))
    assert store.asked["GET"] == 2 * 4 + 2
    order, in_merged = np.lexsort([*apart.T, units]), np.lexsort([*merged.T, of_merged])
    assert (apart[order] == merged[in_merged]).all()
    assert (units[order] == of_merged[in_merged]).all()
    store.asked.clear()
    keys.read_duplicates(corpus, None, ["few"], 7, kept=True)
    assert store.asked["GET"] == 2


@each("size", [2**20 - 1, 2**20, 3 * 2**19])
def test_a_file_reads_the_same_whatever_is_asked_for_around_the_end_of_its_beginning(store, monkeypatch, size):
    monkeypatch.setattr(object_store, "READ_AHEAD", 2**20)
    content = np.random.default_rng(0).bytes(size)
    corpus = Bucket("s3://bucket/large")
    corpus.write("a", content)
    with corpus.readable("a") as file:
        end = object_store.READ_AHEAD
        for at, count in [(size - 8, 8), (0, 10), (end - 5, 20), (end - 3, -1), (size, 4)]:
            file.seek(at)
            assert file.read(count) == content[at : at + count if count >= 0 else None]
            assert file.tell() == min(size, at + count if count >= 0 else size)
        file.seek(0)
        assert file.read() == content
    assert corpus.checksum("a") == (size, hashlib.sha256(content).hexdigest())


def test_a_store_that_goes_away_while_a_file_is_read_is_waited_for_once(store, monkeypatch):
    waited = list[float]()
    clock = SimpleNamespace(monotonic=lambda: 100 + sum(waited), sleep=waited.append)
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 200.0)
    monkeypatch.setattr(stores, "_LONGEST_PAUSE", 200.0)
    monkeypatch.setattr(stores, "_S3_TRIES", 1)  # s3fs pauses between its own, too
    monkeypatch.setattr(stores, "time", clock)
    monkeypatch.setattr(object_store, "READ_AHEAD", 2**20)
    corpus = Bucket("s3://bucket/away while it is read")
    corpus.write("a", bytes(3 * object_store.READ_AHEAD))
    with corpus.readable("a") as file:
        file.seek(2 * object_store.READ_AHEAD)
        store.away = True
        with pytest.raises(StoreUnavailable, match="s3://bucket/away while it is read/a: unavailable for"):
            file.read(1)
    assert waited == [200.0]
    with pytest.raises(StoreUnavailable):
        corpus.get("a")
    assert waited == [200.0]


def test_a_store_that_does_not_answer_is_waited_for_15_s_before_the_claim_and_then_for_5_minutes(store, monkeypatch):
    """Before the claim, the address may be wrong."""
    waited = list[float]()
    clock = SimpleNamespace(monotonic=lambda: 100 + sum(waited), sleep=waited.append)
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 10.0)
    monkeypatch.setattr(stores, "_LONGEST_PAUSE", 10.0)
    monkeypatch.setattr(stores, "_S3_TRIES", 1)
    monkeypatch.setattr(stores, "time", clock)
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 1e6)  # no renewal
    before, claimed = (open_store("s3://bucket/start", at_start=True) for _ in range(2))
    claimed.claim()
    store.away = True
    for corpus, pauses in ((before, 1), (claimed, 30)):
        with pytest.raises(StoreUnavailable, match="unavailable for"):
            corpus.names()
        assert waited == [10.0] * pauses
        waited.clear()
    store.calm()
    claimed.release()


def test_files_that_are_listed_late_belong_to_the_build_all_the_same(store):
    """Its claim and its lines, from which nothing is listed until another driver has tried to claim the corpus."""
    store.late = True
    first, second = Bucket("s3://bucket/late"), Bucket("s3://bucket/late")
    with first.at_work(first.begin()):
        first.append("finished.jsonl", b"1\n", [])
        first.replace_lines("finished.jsonl", b"2\n")
        first.append("finished.jsonl", b"3\n", [])
    assert first.names() == []
    assert list(first.lines("finished.jsonl")) == [b"2", b"3"]
    threading.Timer(0.2, setattr, [store, "late", False]).start()
    with pytest.raises(FailedError, match="another build is at work on it"):
        second.claim()
    first.release()
    assert sorted(Bucket("s3://bucket/late").names("finished.jsonl")) == [
        "finished.jsonl/00000002.whole",
        "finished.jsonl/00000003",
    ]


def test_a_bucket_that_refuses_while_it_is_used_is_one_line(store, file):
    corpus = Bucket("s3://bucket/refusing")
    corpus.claim()
    store.denied = True
    with pytest.raises(StoreError, match=r"s3://bucket/refusing/a: permission denied"):
        corpus.get("a")
    with pytest.raises(UserError), corpus.put("a") as path:
        path.write_bytes(b"a")
    store.calm()
    corpus.release()


@pytest.mark.slow
def test_a_store_that_goes_away_in_a_build_stops_it_and_the_same_command_continues(store, file, in_folder, monkeypatch):
    """It is waited for once, however much is still to be written."""
    waited = list[float]()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(waited), sleep=waited.append)
    with monkeypatch.context() as patch:
        patch.setattr(stores, "_FIRST_PAUSE", 100.0)
        patch.setattr(stores, "_LONGEST_PAUSE", 100.0)
        patch.setattr(stores, "_S3_TRIES", 1)  # s3fs pauses between its own, too
        patch.setattr(stores, "time", clock)
        patch.setattr(object_store, "LEASE_SECONDS", 1e6)  # no renewal, which would wait, too
        store.away_after = 18  # documents, and their tables of dropped ones, are written
        stopped = run_here("data-pipeline", "build", file, "output=s3://bucket/away")
    assert stopped.returncode == 75
    assert re.search(r"s3://bucket/away/\S+: unavailable for \d+ s: .*; run the same command again", stopped.stderr)
    assert "the same command continues" in stopped.stderr
    assert sum(waited) <= stores.WAIT_SECONDS
    store.calm()
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 5.0)  # of the build that ended: the next one waits for all of it
    printed = done_here("data-pipeline", "build", file, "output=s3://bucket/away")
    assert "documents: 4 of 4 units up to date" in printed
    assert contents("s3://bucket/away") == in_folder


@pytest.mark.slow
def test_a_store_that_breaks_off_and_answers_503_costs_time_alone(store, small_corpus, tmp_path):
    write_c4(tmp_path / "c4.json.gz", records=30)
    settings = {"dedup": {**OFF, "lines": True}, "tokenizer": trained(small_corpus)}
    config = write_corpus_file(tmp_path / "corpus.yaml", **settings)
    done_here("data-pipeline", "build", config)
    store.faults = True
    done_here("data-pipeline", "build", config, "output=s3://bucket/faults")
    assert store.busy
    assert store.broken
    store.faults = False
    assert contents("s3://bucket/faults") == contents(load(config, [], CorpusConfig).output)


@pytest.mark.slow
def test_bytes_do_not_depend_on_where_builds_were_killed(store, file, in_folder, tmp_path, monkeypatch):
    """The first once it has put the files of a unit, without their record, the second at the tokens."""
    url = "s3://bucket/killed"
    program = "from data_pipeline.base import object_store; object_store.LEASE_SECONDS = 2.0"
    command = [sys.executable, "-c", f"{program}\nfrom data_pipeline.cli import main; main()", "build", str(file)]
    for stage, when in (("documents", "after the work"), ("tokens", "before the work")):
        planted = with_fault("SIGKILL", stage, when, tmp_path / stage)
        killed = subprocess.run([*command, f"output={url}"], env=planted, capture_output=True, text=True)
        assert (killed.returncode, (tmp_path / stage).exists()) == (-signal.SIGKILL, True), killed.stderr
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 5.0)  # the next build waits for all of it
    printed = done_here("data-pipeline", "build", file, f"output={url}")
    assert "documents: 4 of 4 units up to date" in printed
    assert contents(url) == in_folder


@pytest.mark.slow
def test_two_nodes_with_nothing_in_common_but_the_bucket_write_the_bytes_of_one_process(
    store, tmp_path, tmp_path_factory
):
    """The text is in the bucket, too. The second sees an empty folder in place of all that tests write."""
    for part in range(4):
        write_c4(tmp_path / f"c4-{part}.json.gz", records=12, skip=8 * part)
        store.filesystem().put_file(str(tmp_path / f"c4-{part}.json.gz"), f"bucket/text/c4-{part}.json.gz")
    source = {"format": "c4", "path": "s3://bucket/text/*.json.gz", "language": "en"}
    dedup = {"urls": "newest", "lines": True, "documents": True, "minhash": True, "keys_per_bucket": 100}
    config = write_corpus_file(tmp_path / "corpus.yaml", sources=[source], dedup=dedup)
    hidden = tmp_path_factory.getbasetemp()
    node = Node({"TMPDIR": str(hidden)}, hidden=hidden if can_unshare() else None)
    with cluster(tmp_path, node) as (address, _):
        command = [sys.executable, "-m", "data_pipeline", "build", str(config), "output=s3://bucket/apart"]
        done = subprocess.run([*command, f"ray.address={address}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "node 127.0.0." not in done.stderr
    assert Bucket("s3://bucket/apart").read_json(".stages/timings/documents.json", dict[str, Any])["workers"] == 2
    assert contents("s3://bucket/apart") == contents(build(load(config, [], CorpusConfig)))


@pytest.mark.soak
def test_a_node_that_the_bucket_refuses_is_named_and_its_units_are_done_elsewhere(store, file, in_folder, tmp_path):
    """The nodes' temporary folders are their own."""
    store.denied = "stranger"
    (tmp_path / "scratch").mkdir()
    node = Node({"AWS_ACCESS_KEY_ID": "stranger", "TMPDIR": str(tmp_path / "scratch")})
    with cluster(tmp_path, node) as (address, _):
        command = [sys.executable, "-m", "data_pipeline", "build", str(file), "output=s3://bucket/refused"]
        done = subprocess.run([*command, f"ray.address={address}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "node 127.0.0.2: unit" in done.stderr
    assert "permission denied" in done.stderr
    assert contents("s3://bucket/refused") == in_folder
