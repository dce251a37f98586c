"""The documents stage: each input file becomes one Parquet file of clean documents, with their split."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.atomic import atomic_path, fingerprint
from data_pipeline.cleaning.wikitext import plain_text
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.dedup.urls import normalize_url
from data_pipeline.document import Document
from data_pipeline.errors import UserError
from data_pipeline.sources import READERS
from data_pipeline.sources.stream import open_stream
from data_pipeline.work_units import Finished, Stage, Unit

SCHEMA = pa.schema(
    [(field.name, pa.large_string() if field.name == "text" else pa.string()) for field in fields(Document)]
)
_ROW_GROUP_CHARACTERS = 8_000_000


@dataclass(frozen=True)
class InputFile:
    """A file of a source. `name` is its path relative to the source's root; `stamp` changes when the file does."""

    source: SourceConfig
    path: str
    name: str
    bytes: int
    stamp: str


def plan(config: CorpusConfig) -> list[Unit]:
    """One unit for each input file, in the order of the sources and of the names in each."""
    units = []
    for number, file in enumerate(file for source in config.sources for file in list_files(source)):
        output = f"documents/part-{number:05d}.parquet"
        source = file.source.model_dump(include={"format", "name", "language"})
        spec = {**source, "path": file.path, "file": file.name, "split": config.split.ratio, "output": output}
        stamp = fingerprint([source, file.name, file.bytes, file.stamp, config.split.ratio])
        units.append(Unit(f"part-{number:05d}", spec, stamp, (output,)))
    return units


def list_files(source: SourceConfig) -> list[InputFile]:
    """The files a source's path names, sorted by name. Raises UserError where a path or glob names none."""
    found: dict[str, InputFile] = {}
    for pattern in [source.path] if isinstance(source.path, str) else source.path:
        filesystem, path = fsspec.core.url_to_fs(pattern)
        paths = sorted(filesystem.glob(path)) if fsspec.core.has_magic(path) else [path]
        if filesystem.isdir(path):
            paths = sorted(filesystem.find(path))
            root = PurePosixPath(path)
        else:
            root = PurePosixPath(*_until_magic(PurePosixPath(path)))
        files = [candidate for candidate in paths if filesystem.isfile(candidate)]
        if not files:
            raise UserError(f"{pattern}: no such file (path of source {source.name!r})")
        for file in files:
            info = filesystem.info(file)
            name = str(PurePosixPath(file).relative_to(root))
            if name in found:
                raise UserError(
                    f"{file}: source {source.name!r} already has a file {name!r}; give it a source of its own"
                )
            stamp = str(info.get("mtime") or info.get("ETag") or info.get("LastModified") or "")
            found[name] = InputFile(source, filesystem.unstrip_protocol(file), name, info["size"], stamp)
    return [found[name] for name in sorted(found)]


def _until_magic(path: PurePosixPath) -> list[str]:
    parts = list(path.parent.parts)
    magic = next((position for position, part in enumerate(parts) if fsspec.core.has_magic(part)), len(parts))
    return parts[:magic]


def write_documents(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Reads one input file, extracts, splits and writes its documents; returns what came in and what was dropped."""
    counters: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    text_bytes = 0
    with atomic_path(corpus / spec["output"]) as path, pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        batch: list[dict[str, str]] = []
        characters = 0
        for document in _documents(spec, counters):
            batch.append(asdict(document))
            characters += len(document.text)
            documents[document.split] += 1
            text_bytes += len(document.text.encode())
            if characters >= _ROW_GROUP_CHARACTERS:
                writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
                batch, characters = [], 0
        writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
    read, truncated = counters.pop("read"), counters.pop("truncated_xml", 0)
    return {
        "source": spec["name"],
        "file": spec["file"],
        "status": "truncated" if truncated else "ok",
        "reason": "the XML ends inside a page; every whole page was read" if truncated else "",
        **_checksum(spec["path"]),
        "read": read,
        "dropped": dict(sorted(counters.items())),
        "documents": dict(sorted(documents.items())),
        "text_bytes": text_bytes,
    }


STAGE = Stage("documents", 1, write_documents)


def read_documents(corpus: Path, part: str, columns: list[str]) -> Iterator[dict[str, str]]:
    """The documents of one Parquet file, a row group at a time."""
    with pq.ParquetFile(corpus / part) as file:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group, columns).to_pylist()


def total(finished: list[Finished], split: str) -> int:
    return sum(unit.result["documents"].get(split, 0) for unit in finished)


def _documents(spec: dict[str, Any], counters: Counter[str]) -> Iterator[Document]:
    with open_stream(spec["path"]) as stream:
        for record in READERS[spec["format"]](stream, spec["path"], counters):
            text = plain_text(record.text) if spec["format"] == "wikipedia" else record.text
            if not text:
                counters["empty"] += 1
                continue
            identity = f"{spec['name']}/{spec['file']}/{record.ordinal:09d}"
            split = split_of(record.url, identity, *spec["split"])
            yield Document(identity, text, record.url, record.title, spec["language"], spec["name"], split)


def split_of(url: str, identity: str, held_out: int, modulus: int) -> str:
    """Held out ("validation") where md5 of the normalised URL, else of the id, mod `modulus` is below `held_out`."""
    digest = hashlib.md5((normalize_url(url) or identity).encode(), usedforsecurity=False)
    return "validation" if int(digest.hexdigest(), 16) % modulus < held_out else "train"


def _checksum(path: str) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with fsspec.open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}
