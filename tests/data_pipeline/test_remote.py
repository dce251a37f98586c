"""A corpus on a remote file system, read through a bounded disk cache that processes share."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.corpus import default_directory
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import TrainingBatches, validation_batches
from data_pipeline.loading.reader import DiskCache
from data_pipeline.loading.stream import Stream
from tests.data_pipeline.build_processes import flip


def zipped(corpus: Path, path: Path) -> str:
    """The finished corpus in an archive, which fsspec reads as a file system."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(corpus.rglob("*")):
            if file.is_file() and not {".stages", "documents"} & set(file.relative_to(corpus).parts):
                archive.write(file, file.relative_to(corpus))
    return f"zip://::file://{path}"


def test_batches_of_a_remote_corpus_are_those_of_a_local_one(small_corpus, tmp_path):
    url, cache = zipped(small_corpus, tmp_path / "corpus.zip"), tmp_path / "cache"
    remote, local = open_corpus(url, cache), open_corpus(small_corpus)
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
    blocks = [path for path in (cache / "blocks").rglob("*") if path.is_file()]
    assert len(blocks) == sum(len(local.blocks(split).rows) for split in ("train", "validation"))
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in blocks)


def test_a_remote_corpus_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"manifest.json: no such file"):
        open_corpus(f"zip://::file://{tmp_path}/nothing.zip", tmp_path / "cache")
    with pytest.raises(UserError, match=r"manifest.json: can't be read"):
        open_corpus("no-such-protocol://corpus", tmp_path / "cache")


def test_damage_on_the_other_side_is_named(small_corpus, tmp_path):
    copy = shutil.copytree(small_corpus, tmp_path / "copy")
    flip(copy / "shards/train/shard-00000.tar", 700)
    corpus = open_corpus(zipped(copy, tmp_path / "corpus.zip"), tmp_path / "cache")
    with pytest.raises(DamagedInput, match=r"zip://.*train/shard-00000.tar.*sha256 differs"):
        list(TrainingBatches(Stream([corpus], [1.0], 0, 8), BatchLayout(0, 1, 128, 1)).loader(45, 0))


def content(number: int) -> bytes:
    return bytes([number % 256]) * 1000


def digest(number: int) -> str:
    return hashlib.sha256(content(number)).hexdigest()


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


def test_a_cached_file_of_other_content_is_replaced(tmp_path):
    cache = DiskCache(tmp_path, limit=10_000)
    cache.get(digest(1), lambda: content(1))
    for other in (b"", content(2)):  # as a full disk may leave it, and as a bad one
        (tmp_path / digest(1)[:2] / digest(1)).write_bytes(other)
        assert cache.get(digest(1), lambda: content(1)) == content(1)


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
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 22_000
