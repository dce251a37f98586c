"""Opens a finished corpus in a directory or at an fsspec URL. If there is none, names the corpus file that makes it.

manifest.json has what training needs: files with checksums, counts and settings. `lineage.parquet` lists the input
files and the files of documents.
"""

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from pydantic import NonNegativeInt

from data_pipeline.base import paths, stores
from data_pipeline.base.arrow_tables import table_of
from data_pipeline.base.atomic import sha256, write_bytes
from data_pipeline.base.errors import FailedError, MissingPackage, UserError, one_line
from data_pipeline.base.json_file import PathBelow, adapter, parse_json, read_json, seal_holds
from data_pipeline.base.packages import installed_then
from data_pipeline.corpus.blocks import Blocks
from data_pipeline.corpus.objectives.objective import AnyObjective, Objective
from data_pipeline.corpus.tokenizer import Tokenizer, TokenizerDescription, load

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
LINEAGE = "lineage.parquet"
_INPUT, _DOCUMENTS = "input", "documents"
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("kind", "source", "name")]
    + [("bytes", pa.int64()), ("sha256", pa.string()), ("status", pa.string())]
)
_OUTPUT = re.compile(r"^output:.*$", re.MULTILINE)
DOCUMENTS = "documents/"
CACHE_BYTES = 100 * 10**9


@dataclass(frozen=True)
class ShardEntry:
    name: PathBelow
    rows: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str


@dataclass(frozen=True)
class SplitEntry:
    rows: NonNegativeInt
    tokens: NonNegativeInt
    documents: NonNegativeInt
    shards: list[ShardEntry]


@dataclass(frozen=True)
class RowsEntry:
    """The section `rows` of the corpus file. `raw_length`: tokens of a row before the objective is applied."""

    packing: str
    end_of_document: bool
    objective: AnyObjective
    apply_at: Literal["load", "build"]
    raw_length: NonNegativeInt


@dataclass(frozen=True)
class FileEntry:
    file: PathBelow
    sha256: str


@dataclass(frozen=True)
class InputEntry:
    """A file that was read. `file` is its path within the source."""

    source: str
    file: str
    bytes: int
    sha256: str
    status: str


@dataclass(frozen=True)
class DocumentsEntry:
    name: PathBelow
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Lineage:
    """The rows of lineage.parquet, which training doesn't need: inputs, then documents."""

    inputs: list[InputEntry] = field(default_factory=list)
    documents: list[DocumentsEntry] = field(default_factory=list)

    def table(self) -> pa.Table:
        rows = [(_INPUT, *astuple(one)) for one in self.inputs]
        rows += [(_DOCUMENTS, None, *astuple(one), None) for one in self.documents]
        return table_of(rows, _SCHEMA)

    @classmethod
    def read(cls, content: bytes, path: str) -> "Lineage":
        """The lineage in the `content` of the file at `path`. Raises FailedError if it is damaged."""
        try:
            rows = pq.read_table(pa.BufferReader(content)).to_pylist()
            inputs = [{**row, "file": row["name"]} for row in rows if row["kind"] == _INPUT]
            documents = [row for row in rows if row["kind"] == _DOCUMENTS]
            return adapter(cast(Any, cls)).validate_python({"inputs": inputs, "documents": documents})
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise FailedError(f"{path}: damaged: {one_line(error)}") from None


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        config: the settings, without paths.
        lineage: the file with inputs and documents; None: an early manifest, which lists them itself.
        objective_from: the installed package with the objective; "" if it ships.
    """

    format_version: int
    name: str
    fingerprint: str
    seed: int
    tokenizer: TokenizerDescription
    rows: RowsEntry
    splits: dict[str, SplitEntry]
    config: dict[str, Any] = field(default_factory=dict)
    blocks: FileEntry = field(kw_only=True)
    lineage: FileEntry | None = None
    code_version: str = ""
    objective_from: str = ""

    @property
    def shards(self) -> list[ShardEntry]:
        """The shards of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]


@dataclass(frozen=True)
class _Beginning:
    format_version: int
    objective_from: str = ""


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`. Raises UserError if there is none, FailedError if it is damaged."""
    refuse_file(directory)
    path = directory / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {how_to_build(directory)} makes it") from None
    except OSError as error:
        raise FailedError(f"{path}: can't be read: {error.strerror}") from None
    beginning = parse_json(content, _Beginning, path)
    if (version := beginning.format_version) != FORMAT_VERSION:
        raise UserError(f"{path}: expected format version {FORMAT_VERSION}, got {version}")
    if not seal_holds(content):
        reason = "damaged: its sha256 isn't that of its content"
        raise FailedError(f"{path}: {reason}; data-pipeline build CORPUS.yaml --repair writes it again")
    try:
        return parse_json(content, Manifest, path)
    except MissingPackage as error:
        raise MissingPackage(f"{error}; {installed_then(beginning.objective_from)}") from None


def refuse_file(directory: Path) -> None:
    """Raises UserError if `directory` is a file. It is probably a corpus file, whose output the message then names."""
    if directory.is_file():
        output = _output(directory)
        hint = f"; it is the corpus file of {output}" if output else ""
        raise UserError(f"{directory}: expected the directory of a corpus, found a file{hint}")


@dataclass(frozen=True)
class Remote:
    """The `url` of a remote corpus, and the directory `cache` of this machine for up to `cache_bytes` of its blocks.

    `wait_seconds`: how long requests are retried while the store doesn't answer.
    """

    url: str
    cache: Path
    cache_bytes: int = CACHE_BYTES
    wait_seconds: float = stores.WAIT_SECONDS


@dataclass(frozen=True)
class Corpus:
    """A finished corpus in `directory`; of a `remote` corpus, the directory has copies of all files but the shards.

    `other_objective`: replaces the objective that the corpus was built for, with noise at load.
    """

    directory: Path
    manifest: Manifest
    remote: Remote | None = None
    other_objective: Objective | None = None

    def __repr__(self) -> str:
        splits = ", ".join(f"{entry.rows:,} {name} rows" for name, entry in self.manifest.splits.items())
        return f"Corpus({self.location!r}: {splits}, {self.manifest.tokenizer.size:,} ids, {self.objective.name})"

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

    def with_objective(self, objective: Objective | None) -> Self:
        """This corpus with another objective; None: its own."""
        return replace(self, other_objective=objective)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load(self.directory, self.manifest.tokenizer)

    def rows(self, split: str) -> int:
        return self.manifest.splits[split].rows

    def lineage(self) -> Lineage:
        """The files that the corpus was made from. Raises FailedError if their list is missing or damaged."""
        entry = self.manifest.lineage
        if entry is None:
            return read_json(self.directory / MANIFEST, Lineage)
        if self.remote:
            _copied(self.remote, self.directory, entry.file, entry.sha256)
        return Lineage.read(self._content(entry), str(self.directory / entry.file))

    def blocks(self, split: str) -> Blocks:
        """The blocks of `split`. Raises FailedError if blocks.parquet is missing or damaged, or names a shard outside
        the corpus."""
        entry = self.manifest.blocks
        table = pq.read_table(pa.BufferReader(self._content(entry)), filters=pc.field("split") == split)
        blocks = Blocks.of_table(table)
        for name in blocks.shards:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                reason = f"damaged: the shard {name!r} isn't a file of this corpus"
                raise FailedError(f"{self.directory / entry.file}: {reason}")
        return blocks

    def _content(self, entry: FileEntry) -> bytes:
        """The content of a file that the manifest names. Raises FailedError if it is missing or damaged."""
        path = self.directory / entry.file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FailedError(f"{path}: can't be read: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise FailedError(f"{path}: sha256 differs from the manifest's")
        return content


def open_corpus(
    location: str | Path,
    cache: Path | None = None,
    cache_bytes: int = CACHE_BYTES,
    wait_seconds: float = stores.WAIT_SECONDS,
) -> Corpus:
    """The corpus in a directory or at an fsspec URL. Raises UserError if there is none.

    The manifest, the tokenizer and the index of blocks of a remote corpus are copied into `cache` now; the default is
    on a disk of this machine. Blocks are copied there when they are read, up to `cache_bytes`.
    """
    if "://" in str(location):
        url = str(location).rstrip("/")
        return _open_remote(Remote(url, cache or default_directory(), cache_bytes, wait_seconds))
    return Corpus(Path(location), read_manifest(Path(location)))


def default_directory() -> Path:
    """A directory of this user below $SLURM_TMPDIR, $TMPDIR or /tmp, which are on this machine's disks.

    Raises UserError if the directory belongs to another user, who could replace its content.
    """
    directory = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()) / f"encdec-pretrain-{os.getuid()}"
    with contextlib.suppress(OSError):  # the first write reports it
        directory.mkdir(mode=0o700, exist_ok=True)
    if directory.exists() and {directory.stat().st_uid, directory.lstat().st_uid} != {os.getuid()}:
        raise UserError(f"data.cache.directory: {directory}, the default, belongs to another user; name another one")
    return directory


def _open_remote(remote: Remote) -> Corpus:
    content = _fetch(remote, MANIFEST)
    directory = remote.cache / "corpora" / hashlib.sha256(content).hexdigest()
    write_bytes(directory / MANIFEST, content)
    corpus = Corpus(directory, read_manifest(directory))
    blocks = corpus.manifest.blocks
    for name, expected in {**corpus.manifest.tokenizer.files, blocks.file: blocks.sha256}.items():
        _copied(remote, directory, name, expected)
    return replace(corpus, remote=remote)


def _fetch(remote: Remote, name: str) -> bytes:
    with paths.opening(f"{remote.url}/{name}"):
        filesystem, root = stores.filesystem(remote.url)
        path = f"{root.rstrip('/')}/{name}"
        return stores.with_retries(lambda: filesystem.cat_file(path), f"{remote.url}/{name}", remote.wait_seconds)


def _copied(remote: Remote, directory: Path, name: str, expected: str) -> None:
    """Copies a small file of the remote corpus to `directory`, unless it has the file with this sha256."""
    path = directory / name
    if not path.exists() or sha256(path) != expected:
        write_bytes(path, _fetch(remote, name))
        if sha256(path) != expected:
            raise FailedError(f"{remote.url}/{name}: sha256 differs from the manifest's")


def corpus_file_of(directory: str | Path, folders: Iterable[Path] = ()) -> str | None:
    """The corpus file whose `output` is `directory`, as commands take it; None if there is none.

    Looks in `folders`, in the current folder, and among the files that ship (`configs:corpora/NAME.yaml`).
    """
    beside = {str(path): path for folder in (*folders, Path()) for path in sorted(folder.glob("*.yaml"))}
    wanted = Path(directory).absolute()
    for name, path in {**beside, **paths.shipped("corpora/*.yaml")}.items():
        output = _output(path)
        if output is not None and Path(output).absolute() == wanted:
            return name
    return None


def how_to_build(directory: str | Path, folders: Iterable[Path] = ()) -> str:
    """The command that builds the corpus in `directory`."""
    return f"data-pipeline build {corpus_file_of(directory, folders) or 'CORPUS.yaml'}"


def _output(path: Path) -> str | None:
    """The top-level key `output` of a YAML file. Only its line is parsed, since the file may be anything."""
    try:
        found = _OUTPUT.search(path.read_text(encoding="utf-8"))
        value = yaml.safe_load(found[0])["output"] if found else None
        return paths.local(value) if isinstance(value, str) else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
