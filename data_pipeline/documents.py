"""The documents stage: each input file, or range of one, becomes one Parquet file of clean documents."""

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.atomic import atomic_path, fingerprint
from data_pipeline.cleaning.config import CleaningConfig
from data_pipeline.cleaning.page import Cleaner
from data_pipeline.cleaning.wikitext import plain_text
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.keys import NOBODY, Keys
from data_pipeline.dedup.urls import NewestUrl, normalize_url
from data_pipeline.document import Document
from data_pipeline.errors import DamagedInput, UserError
from data_pipeline.inputs import list_files, pieces
from data_pipeline.sources import READERS, Input, Intake, Record
from data_pipeline.work_units import Finished, Stage, Unit

SCHEMA = pa.schema(
    [(field.name, pa.large_string() if field.name == "text" else pa.string()) for field in fields(Document)]
)
_ROW_GROUP_CHARACTERS = 8_000_000
_DOMAINS_KEPT = 1000  # of each unit; a report shows the first few of all


def plan(config: CorpusConfig, corpus: Path) -> list[Unit]:
    """One unit for each input file or range of one, in the order of the sources and of the names in each.

    What is deduplicated later is no document of the corpus yet, and lies with the stages.
    """
    units = []
    steps = config.dedup.steps
    files = [file for source in config.sources for file in list_files(source)]
    plans = corpus / ".stages" / "plans"
    inputs = [(file, piece) for file in files for piece in pieces(file, config.bytes_per_unit, plans)]
    for number, (file, piece) in enumerate(inputs):
        name = f"part-{number:05d}"
        output = f".stages/documents/{name}.parquet" if steps else f"documents/{name}.parquet"
        urls = f".stages/documents/{name}.urls.safetensors" if "urls" in steps else None
        source = file.source.model_dump(include={"format", "name", "language", "options"})
        settings = {
            **source,
            "cleaning": config.cleaning_of(file.source).model_dump(),
            "file": file.name,
            "range": [piece.start, piece.stop, piece.first_ordinal],
            "split": config.split.ratio,
        }
        stamp = fingerprint([settings, file.bytes, file.stamp, output, urls])
        size = (piece.stop or file.bytes) - piece.start
        spec = {**settings, "path": file.path, "output": output, "urls": urls}
        units.append(Unit(name, spec, stamp, (output, urls) if urls else (output,), size))
    return units


@dataclass
class Histograms:
    """What is in the kept documents: `lengths` by power of two of characters, languages, domains of their URLs."""

    lengths: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)

    def add(self, document: Document) -> None:
        self.lengths[str(int(math.log2(len(document.text))))] += 1
        self.languages[document.language or "unknown"] += 1
        if document.url:
            self.domains[_domain(document.url)] += 1

    def as_json(self) -> dict[str, dict[str, int]]:
        return {
            "lengths": dict(self.lengths),
            "languages": dict(self.languages),
            "domains": dict(sorted(self.domains.items(), key=lambda item: (-item[1], item[0]))[:_DOMAINS_KEPT]),
        }


class DocumentsFile:
    """Documents on their way into one Parquet file, and what is counted of them."""

    def __init__(self, writer: pq.ParquetWriter):
        self._writer = writer
        self._batch: list[dict[str, str]] = []
        self._characters = 0
        self._documents: Counter[str] = Counter()
        self._histograms = Histograms()
        self._text_bytes = 0

    def add(self, document: Document) -> None:
        self._batch.append(asdict(document))
        self._characters += len(document.text)
        self._documents[document.split] += 1
        self._text_bytes += len(document.text.encode())
        self._histograms.add(document)
        if self._characters >= _ROW_GROUP_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Writes what was added since the last time as a row group."""
        self._writer.write_table(pa.Table.from_pylist(self._batch, SCHEMA))
        self._batch, self._characters = [], 0

    @property
    def counts(self) -> dict[str, Any]:
        """Documents by split, bytes of text, histograms."""
        return {
            "documents": dict(sorted(self._documents.items())),
            "text_bytes": self._text_bytes,
            **self._histograms.as_json(),
        }


@contextlib.contextmanager
def documents_file(path: Path) -> Iterator[DocumentsFile]:
    """A Parquet file of documents that appears under `path` when the block ends well."""
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        documents = DocumentsFile(writer)
        yield documents
        documents.flush()


def write_documents(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Reads, cleans and splits one input and writes its documents; returns what came in and what was dropped.

    Damage ends the input, not the build: what was whole is kept, the place and the reason are returned.
    """
    intake = Intake()
    damage: list[tuple[str, str]] = []
    urls = NewestUrl.noted() if spec["urls"] else None
    with documents_file(corpus / spec["output"]) as documents:
        try:
            for document in _documents(spec, intake, urls):
                documents.add(document)
        except DamagedInput as error:
            damage.append((error.position, error.reason))
        except UserError as error:  # the file went away, or may not be read
            damage.append(("the start", str(error)))
    counts = intake.counters
    return {
        "source": spec["name"],
        "file": spec["file"],
        "range": spec["range"],
        **(_checksum(spec["path"]) if spec["range"][0] == 0 else {}),
        "status": "truncated" if counts["truncated_xml"] else "damaged" if damage or intake.damage else "ok",
        "damage": [*damage, *intake.damage],
        "counts": dict(sorted(counts.items())),
        "examples": dict(sorted(counts.examples.items())),
        **documents.counts,
        **({"url_keys": urls.write(corpus / spec["urls"])} if urls else {}),
    }


STAGE = Stage("documents", 2, write_documents)


def read_documents(corpus: Path, part: str, columns: list[str]) -> Iterator[dict[str, str]]:
    """The documents of one Parquet file, a row group at a time."""
    with pq.ParquetFile(corpus / part) as file:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group, columns).to_pylist()


def total(finished: list[Finished], split: str) -> int:
    return sum(unit.result["documents"].get(split, 0) for unit in finished)


def split_of(url: str, identity: str, held_out: int, modulus: int) -> str:
    """Held out ("validation") where md5 of the normalised URL, else of the id, mod `modulus` is below `held_out`."""
    digest = hashlib.md5((normalize_url(url) or identity).encode(), usedforsecurity=False)
    return "validation" if int(digest.hexdigest(), 16) % modulus < held_out else "train"


def _documents(spec: dict[str, Any], intake: Intake, urls: Keys | None) -> Iterator[Document]:
    """The documents of one input. `urls` notes every page that isn't too long: all may be the newest of their URL."""
    clean = Cleaner(CleaningConfig.model_validate(spec["cleaning"]))
    start, stop, first_ordinal = spec["range"]
    number = 0
    for record in READERS[spec["format"]](Input(spec["path"], start, stop, first_ordinal, spec["options"]), intake):
        text = plain_text(record.text) if spec["format"] == "wikipedia" else record.text
        if not text.strip():
            intake.counters.drop("empty", record.title or record.url or record.text)
            continue
        too_long = intake.counters["too_long"]
        kept = clean(text, record.url, spec["language"] or record.language, intake.counters)
        if urls and record.url and not record.target and intake.counters["too_long"] == too_long:
            words = NewestUrl.words(record.url, record.timestamp, kept is not None)
            urls.add(NOBODY if kept is None else number, 0, words)
        if kept is not None:
            yield _document(record, *kept, spec)
            number += 1


def _document(record: Record, text: str, language: str, spec: dict[str, Any]) -> Document:
    identity = f"{spec['name']}/{spec['file']}/{record.ordinal:09d}"
    return Document(
        id=identity,
        text=text,
        url=record.url,
        title=record.title,
        language=language,
        source=spec["name"],
        split=split_of(record.url, identity, *spec["split"]),
        timestamp=record.timestamp,
        target=record.target,
    )


def _domain(url: str) -> str:
    """ "https://www.example.org:80/a" -> "example.org"; what can't be parsed is a domain of its own kind."""
    try:
        return (urlsplit(url).hostname or "unknown").removeprefix("www.")
    except ValueError:
        return "unknown"


def _checksum(path: str) -> dict[str, Any]:
    """Bytes and sha256 of a whole input file."""
    digest, size = hashlib.sha256(), 0
    try:
        with fsspec.open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
    except OSError:
        return {"bytes": size, "sha256": ""}  # listed as damaged by then
    return {"bytes": size, "sha256": digest.hexdigest()}
