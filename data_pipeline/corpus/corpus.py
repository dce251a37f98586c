"""Opens a finished corpus, with its manifest, tokenizer and blocks, in a directory or at an fsspec URL."""

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_pipeline.corpus.manifest import FILE, Manifest, read_manifest
from data_pipeline.foundation import stores
from data_pipeline.foundation.atomic import sha256, write_bytes
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.paths import opening
from data_pipeline.objectives.objective import Objective
from data_pipeline.tokenizer import Tokenizer, load

DOCUMENTS = "documents/"
CACHE_BYTES = 100 * 10**9


@dataclass(frozen=True)
class Blocks:
    """The blocks of one split, as columns (n,): the location and the rows of each block.

    `shard` is an index into the names `shards`; `sha256` is (n, 32) uint8. A block takes 68 bytes in all.
    """

    shards: list[str]
    shard: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    first_row: np.ndarray
    rows: np.ndarray
    sha256: np.ndarray

    @classmethod
    def of_table(cls, table: pa.Table) -> "Blocks":
        shard = table["shard"].combine_chunks().dictionary_encode()
        digests = bytes.fromhex("".join(table["sha256"].to_pylist()))
        return cls(
            shards=shard.dictionary.to_pylist(),
            shard=shard.indices.to_numpy(),
            sha256=np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32),
            **{name: table[name].to_numpy() for name in ("offset", "length", "first_row", "rows")},
        )

    def of_shard(self, name: str) -> np.ndarray:
        """Numbers of the blocks of one shard."""
        return np.flatnonzero(self.shard == self.shards.index(name)) if name in self.shards else np.zeros(0, np.int64)

    def is_whole(self, number: int, content: bytes | memoryview) -> bool:
        return hashlib.sha256(content).digest() == self.sha256[number].tobytes()


@dataclass(frozen=True)
class Remote:
    """Where a remote corpus is, and the directory on this machine that caches up to `cache_bytes` of its blocks.

    While the store doesn't answer, requests are repeated, for up to `wait_seconds`.
    """

    url: str
    cache: Path
    cache_bytes: int = CACHE_BYTES
    wait_seconds: float = stores.WAIT_SECONDS


@dataclass(frozen=True)
class Corpus:
    """A finished corpus in `directory`. If it is `remote`, that has copies of its small files, but no shards.

    `other_objective` replaces the one that it was built for, if noise is applied at load.
    """

    directory: Path
    manifest: Manifest
    remote: Remote | None = None
    other_objective: Objective | None = None

    @property
    def location(self) -> str:
        """Its directory or URL."""
        return self.remote.url if self.remote else str(self.directory)

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def objective(self) -> Objective:
        return self.other_objective or self.manifest.rows.objective

    def with_objective(self, objective: Objective | None) -> "Corpus":
        """This corpus with another objective; with its own for None."""
        return replace(self, other_objective=objective)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load(self.directory, self.manifest.tokenizer)

    def rows(self, split: str) -> int:
        return self.manifest.splits[split].rows

    def blocks(self, split: str) -> Blocks:
        """The blocks of `split`, read from blocks.parquet. Raises FailedError if a shard is outside the corpus."""
        path = self.directory / "blocks.parquet"
        blocks = Blocks.of_table(pq.read_table(path, filters=pc.field("split") == split))
        for name in blocks.shards:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise FailedError(f"{path}: damaged: the shard {name!r} isn't a file of this corpus")
        return blocks


def open_corpus(
    location: str | Path,
    cache: Path | None = None,
    cache_bytes: int = CACHE_BYTES,
    wait_seconds: float = stores.WAIT_SECONDS,
) -> Corpus:
    """The corpus in a directory or at an fsspec URL. Raises UserError if there is none.

    The manifest, the tokenizer and the index of blocks of a remote corpus are copied into `cache` now, by default to a
    disk of this machine. Blocks are copied there when they are read, up to `cache_bytes`.
    """
    if "://" in str(location):
        url = str(location).rstrip("/")
        return _open_remote(Remote(url, cache or default_directory(), cache_bytes, wait_seconds))
    return Corpus(Path(location), read_manifest(Path(location)))


def default_directory() -> Path:
    """A directory of this user below $SLURM_TMPDIR, $TMPDIR or /tmp: on this machine's disk, unlike home directories.

    It is created for this user alone. Raises UserError if the directory belongs to another user, who could
    replace its content.
    """
    directory = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()) / f"encdec-pretrain-{os.getuid()}"
    with contextlib.suppress(OSError):  # the first write reports it
        directory.mkdir(mode=0o700, exist_ok=True)
    if directory.exists() and {directory.stat().st_uid, directory.lstat().st_uid} != {os.getuid()}:
        raise UserError(f"data.cache.directory: {directory}, the default, belongs to another user; name another one")
    return directory


def _open_remote(remote: Remote) -> Corpus:
    url = remote.url

    def fetch(name: str) -> bytes:
        with opening(f"{url}/{name}"):
            filesystem, root = stores.filesystem(url)
            path = f"{root.rstrip('/')}/{name}"
            return stores.with_retries(lambda: filesystem.cat_file(path), f"{url}/{name}", remote.wait_seconds)

    content = fetch(FILE)
    directory = remote.cache / "corpora" / hashlib.sha256(content).hexdigest()
    write_bytes(directory / FILE, content)
    corpus = Corpus(directory, read_manifest(directory))
    blocks = corpus.manifest.blocks
    for name, expected in {**corpus.manifest.tokenizer.files, blocks.file: blocks.sha256}.items():
        path = directory / name
        if not path.exists() or sha256(path) != expected:
            write_bytes(path, fetch(name))
            if sha256(path) != expected:
                raise FailedError(f"{url}/{name}: sha256 differs from the manifest's")
    return replace(corpus, remote=remote)
