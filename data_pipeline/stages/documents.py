"""The documents stage: each input file, or range of one, becomes clean documents in Parquet files."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from data_pipeline.cleaning.config import CleaningConfig
from data_pipeline.cleaning.page import Cleaner
from data_pipeline.cleaning.wikitext.markup import plain_text
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.keys import NOBODY
from data_pipeline.dedup.urls import NewestUrl, normalize_url
from data_pipeline.execution.inputs import list_files, pieces
from data_pipeline.execution.parts import Histograms, describe, part_file, size_of, totals
from data_pipeline.execution.work_units import Finished, Stage, Unit
from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.sources import READERS, Input, Intake, Record
from data_pipeline.sources.recognition import look_of
from data_pipeline.text.document import Document


def plan(config: CorpusConfig, corpus: Path) -> list[Unit]:
    """One unit for each input file or range of one, ordered by source and by name within each source.

    Documents that will be deduplicated aren't part of the corpus yet, so they are written below `.stages`.
    """
    units = []
    steps = config.steps
    files = [file for source in config.sources for file in list_files(source)]
    plans = corpus / ".stages" / "plans"
    inputs = [(file, piece) for file in files for piece in pieces(file, config.bytes_per_unit, plans)]
    for number, (file, piece) in enumerate(inputs):
        name = f"part-{number:05d}"
        source = file.source.model_dump(include={"format", "name", "language", "options"})
        cleaning = config.cleaning_of(file.source)
        settings = {
            **source,
            "cleaning": (cleaning.without_page_filters() if "filters" in steps else cleaning).model_dump(),
            "file": file.name,
            "range": [piece.start, piece.stop, piece.first_ordinal],
            "split": config.split.ratio,
            "part": name,
            "folder": ".stages/documents" if steps else "documents",
            "urls": "urls" in steps,
            "characters_per_part": config.characters_per_part,
        }
        stamp = fingerprint([settings, file.bytes, file.stamp])
        size = (piece.stop or file.bytes) - piece.start
        units.append(Unit(name, {**settings, "path": file.path}, stamp, bytes=size))
    return units


class PartsWriter:
    """Writes the parts of one unit. Call `add` for every page read, with the document made from it, if any.

    Use as a context manager. A part ends after `characters_per_part` characters of pages. `results` describes parts.
    """

    def __init__(self, corpus: Path, spec: dict[str, Any]):
        self._corpus, self._spec = corpus, spec
        self._stack = contextlib.ExitStack()
        self._histograms = Histograms()
        self.results: list[dict[str, Any]] = []

    def __enter__(self) -> "PartsWriter":
        self._open(self._spec["range"][2])
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None:
            self._close()
        self._stack.__exit__(*raised)

    def add(self, record: Record, document: Document | None, competes: bool) -> None:
        """Adds a page that was read, and its document, if any. `competes`: whether it may be the newest page of its
        URL."""
        if self._characters >= self._spec["characters_per_part"]:
            self._close()
            self._open(record.ordinal)
        self._characters += size_of(record.text) + len(record.target)
        if self._urls and competes:
            words = NewestUrl.words(record.url, record.timestamp, document is not None)
            self._urls.add(NOBODY if document is None else self._file.documents.total(), 0, words)
        if document is not None:
            self._file.add(document)
            self._histograms.add(document)

    def as_json(self) -> dict[str, Any]:
        return {"parts": self.results, **totals(self.results), **self._histograms.as_json()}

    def _open(self, first_ordinal: int) -> None:
        number = len(self.results)
        name = self._spec["part"] + (f"_{number:05d}" if number else "")  # sorts in order
        self._path = self._corpus / self._spec["folder"] / f"{name}.parquet"
        self._first_id = _identity(self._spec, first_ordinal)
        self._file = self._stack.enter_context(part_file(self._path))
        self._urls = NewestUrl.noted() if self._spec["urls"] else None
        self._characters = 0

    def _close(self) -> None:
        self._stack.close()
        self._histograms.end_part()
        urls, keys = None, 0
        if self._urls:
            urls = self._path.with_suffix(".urls.safetensors")
            keys = self._urls.write(urls)
        source = self._spec["name"]
        self.results.append(describe(self._corpus, self._path, self._file, source, self._first_id, urls, keys))


def write_documents(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Reads, cleans and splits one input and writes its documents; returns counts of what was read and dropped.

    Damage ends the input, not the build: undamaged records are kept, and the result has the position and reason. The
    status is "unreadable" if there is no undamaged record.
    """
    intake = Intake()
    damage: list[tuple[str, str]] = []
    with PartsWriter(corpus, spec) as parts:
        try:
            for page in _pages(spec, intake):
                parts.add(*page)
        except DamagedInput as error:
            damage.append((error.position, error.reason))
        except UserError as error:  # the file was removed, or can't be read
            damage.append(("the start", str(error)))
    counts = intake.counters
    found = [*damage, *intake.damage]
    unreadable = bool(found) and counts["read"] <= counts["damaged"]
    if unreadable and (look := look_of(spec["path"])):
        position, reason = found[0]
        name = look.description if spec["format"] in look.formats else str(look)
        found[0] = (position, reason if name in reason else f"{reason}; it looks like {name}")
    return {
        "source": spec["name"],
        "file": spec["file"],
        "range": spec["range"],
        **(_checksum(spec["path"]) if spec["range"][0] == 0 else {}),
        "status": _status(unreadable, bool(counts["truncated_xml"]), bool(found)),
        "damage": found,
        "counts": dict(sorted(counts.items())),
        "examples": dict(sorted(counts.examples.items())),
        **parts.as_json(),
    }


def _status(unreadable: bool, truncated: bool, damaged: bool) -> str:
    return "unreadable" if unreadable else "truncated" if truncated else "damaged" if damaged else "ok"


STAGE = Stage("documents", 4, write_documents, "lower characters_per_part")


def total(finished: list[Finished], split: str) -> int:
    return sum(unit.result["documents"].get(split, 0) for unit in finished)


def split_of(url: str, identity: str, held_out: int, modulus: int) -> str:
    """ "validation" if the md5 of the normalised URL (or of the id) mod `modulus` is below `held_out`, else "train"."""
    digest = hashlib.md5((normalize_url(url) or identity).encode(), usedforsecurity=False)
    return "validation" if int(digest.hexdigest(), 16) % modulus < held_out else "train"


def _pages(spec: dict[str, Any], intake: Intake) -> Iterator[tuple[Record, Document | None, bool]]:
    """Each page of one input, the document made from it, if any, and whether it may be the newest page of its URL.

    Every page that isn't too long may be the newest, even one that cleaning drops.
    """
    clean = Cleaner(CleaningConfig.model_validate(spec["cleaning"]))
    start, stop, first_ordinal = spec["range"]
    for record in READERS[spec["format"]](Input(spec["path"], start, stop, first_ordinal, spec["options"]), intake):
        text = record.text
        if spec["format"] == "wikipedia":
            text = plain_text(text, record.title, record.hidden_namespaces)
        if not text.strip():
            intake.counters.drop("empty", record.title or record.url or record.text)
            continue
        too_long = intake.counters["too_long"]
        kept = clean(text, record.url, spec["language"] or record.language, intake.counters)
        competes = bool(record.url and not record.target and intake.counters["too_long"] == too_long)
        yield record, _document(record, *kept, spec) if kept else None, competes


def _document(record: Record, text: str, language: str, spec: dict[str, Any]) -> Document:
    identity = _identity(spec, record.ordinal)
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


def _identity(spec: dict[str, Any], ordinal: int) -> str:
    return f"{spec['name']}/{spec['file']}/{ordinal:09d}"


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
