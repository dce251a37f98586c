"""manifest.json: the files of a finished corpus with their checksums, its counts, and how it was made; or, where it is
missing, the corpus file that makes it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import NonNegativeInt

from data_pipeline.foundation import paths
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.json_file import PathBelow, read_json, seal_holds
from data_pipeline.objectives.registry import AnyObjective
from data_pipeline.tokenizer import TokenizerDescription

FORMAT_VERSION = 1
FILE = "manifest.json"
_OUTPUT = re.compile(r"^output:.*$", re.MULTILINE)


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
    """The section `rows` of the corpus file, and the tokens of a row before the objective is applied."""

    packing: str
    end_of_document: bool
    objective: AnyObjective
    apply_at: Literal["load", "build"]
    raw_length: NonNegativeInt


@dataclass(frozen=True)
class InputEntry:
    """A file that was read. `file` is its path within the source. `unchecked`: it has no checksums of its own."""

    source: str
    file: str
    bytes: int
    sha256: str
    status: str
    unchecked: bool = False


@dataclass(frozen=True)
class DocumentsEntry:
    name: PathBelow
    bytes: int
    sha256: str


@dataclass(frozen=True)
class BlocksEntry:
    file: PathBelow
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`inputs`, `config` (the settings, without paths), `documents` and `code_version` say how the corpus was made."""

    format_version: int
    name: str
    fingerprint: str
    seed: int
    tokenizer: TokenizerDescription
    rows: RowsEntry
    splits: dict[str, SplitEntry]
    inputs: list[InputEntry] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    documents: list[DocumentsEntry] = field(default_factory=list)
    blocks: BlocksEntry = field(kw_only=True)
    code_version: str = ""

    @property
    def shards(self) -> list[ShardEntry]:
        """The shards of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]


@dataclass(frozen=True)
class _Version:
    format_version: int


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`. Raises UserError if there is none, FailedError if it is damaged."""
    path = directory / FILE
    try:
        version = read_json(path, _Version).format_version
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {how_to_build(directory)} makes it") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: expected format version {FORMAT_VERSION}, got {version}")
    if not seal_holds(path.read_bytes()):
        reason = "damaged: its sha256 isn't that of its content"
        raise FailedError(f"{path}: {reason}; data-pipeline build CORPUS.yaml --repair writes it again")
    return read_json(path, Manifest)


def corpus_file_of(directory: str | Path, folders: Iterable[Path] = ()) -> str | None:
    """The corpus file whose `output` is `directory`, as commands take it; None if there is none.

    It is looked for in `folders`, in the current one, and among those that ship (`configs:corpora/NAME.yaml`).
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
    """The key `output` at the top of a YAML file. Only that line is parsed: the file may be anything."""
    try:
        found = _OUTPUT.search(path.read_text(encoding="utf-8"))
        value = yaml.safe_load(found[0])["output"] if found else None
        return paths.local(value) if isinstance(value, str) else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
