"""Parts: Parquet files of documents, each small enough to be held in memory as keys or as token ids.

Each unit of the documents stage writes one or more parts, and every later stage has a unit for each part.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.execution.work_units import Finished
from data_pipeline.foundation.atomic import atomic_path
from data_pipeline.text.document import Document

SCHEMA = pa.schema(
    [(field.name, pa.large_string() if field.name == "text" else pa.string()) for field in fields(Document)]
)
# A shorter document or line counts as this many characters, since its key, hash and place take memory too.
_CHARACTERS_OF_A_DOCUMENT, _CHARACTERS_OF_A_LINE = 1000, 40
_GROUP_CHARACTERS = 8_000_000
# A report shows the 20 most frequent. The driver holds the results of all units: 0.7 GB for a crawl of 56,000 files.
_DOMAINS_IN_RESULT, _DOMAINS_BETWEEN_PARTS = 100, 10_000


@dataclass(frozen=True)
class Part:
    """A part as one stage passes it to the next.

    `first_id` is the id of its first record: sorted by it, parts hold documents in the order of their ids. `urls` is
    the file with its `url_keys` URL keys, or "" if the config asks for none.
    """

    name: str
    path: str
    checksums: list[str]
    source: str
    first_id: str
    text_bytes: int
    documents: dict[str, int]
    urls: str
    url_keys: int


def parts_of(units: list[Finished]) -> list[Part]:
    """The parts that the `units` of a stage wrote, in order."""
    return [
        Part(
            name=Path(part["path"]).stem,
            checksums=[unit.outputs[name]["sha256"] for name in (part["path"], part["urls"]) if name],
            **part,
        )
        for unit in units
        for part in unit.result["parts"]
    ]


def size_of(text: str) -> int:
    """The number of characters that a text counts as when parts are cut."""
    return max(_CHARACTERS_OF_A_DOCUMENT, _CHARACTERS_OF_A_LINE * text.count("\n"), len(text))


@dataclass
class Histograms:
    """Counts of kept documents by length (`lengths`: the power of two of characters), language and domain."""

    lengths: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)

    def add(self, document: Document) -> None:
        self.lengths[str(int(math.log2(len(document.text))))] += 1
        self.languages[document.language or "unknown"] += 1
        if document.url:
            self.domains[_domain(document.url)] += 1

    def end_part(self) -> None:
        """Forgets rare domains, so that memory grows with the part and not with the unit."""
        self.domains = self._most_common(_DOMAINS_BETWEEN_PARTS)

    def as_json(self) -> dict[str, dict[str, int]]:
        return {
            "lengths": dict(self.lengths),
            "languages": dict(self.languages),
            "domains": dict(self._most_common(_DOMAINS_IN_RESULT)),
        }

    def _most_common(self, number: int) -> Counter[str]:
        """The most frequent domains, sorted by count and then by name."""
        return Counter(dict(sorted(self.domains.items(), key=lambda item: (-item[1], item[0]))[:number]))


class PartFile:
    """Writes documents to one part, with one row group at a time in memory."""

    def __init__(self, writer: pq.ParquetWriter):
        self._writer = writer
        self._group: list[dict[str, str]] = []
        self._characters = 0
        self.documents: Counter[str] = Counter()
        self.text_bytes = 0

    def add(self, document: Document) -> None:
        self._group.append(asdict(document))
        self._characters += size_of(document.text)
        self.documents[document.split] += 1
        self.text_bytes += len(document.text.encode()) + len(document.target.encode())
        if self._characters >= _GROUP_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Writes the documents added since the last flush as a row group."""
        self._writer.write_table(pa.Table.from_pylist(self._group, SCHEMA))
        self._group, self._characters = [], 0


@contextlib.contextmanager
def part_file(path: Path) -> Iterator[PartFile]:
    """A part that appears at `path` if the block ends without an error."""
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        part = PartFile(writer)
        yield part
        part.flush()


def describe(
    corpus: Path, path: Path, file: PartFile, source: str, first_id: str, urls: Path | None = None, url_keys: int = 0
) -> dict[str, Any]:
    """The description of a part in its unit's result: `Part` without the fields that the commit adds."""
    return {
        "path": str(path.relative_to(corpus)),
        "source": source,
        "first_id": first_id,
        "text_bytes": file.text_bytes,
        "documents": dict(sorted(file.documents.items())),
        "urls": str(urls.relative_to(corpus)) if urls else "",
        "url_keys": url_keys,
    }


def totals(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Documents by split and bytes of text over all described `parts` of a unit."""
    documents: Counter[str] = Counter()
    for part in parts:
        documents.update(part["documents"])
    return {"documents": dict(sorted(documents.items())), "text_bytes": sum(part["text_bytes"] for part in parts)}


def keep_only(corpus: Path, folder: str, parts: list[Part]) -> None:
    """Removes the parts in `folder` that aren't in `parts`: an attempt under another config may have written more."""
    known = {name for part in parts for name in (part.path, part.urls)}
    for path in (corpus / folder).glob("part-*"):
        if path.suffix in (".parquet", ".safetensors") and str(path.relative_to(corpus)) not in known:
            path.unlink()


def read_documents(corpus: Path, part: str, columns: list[str]) -> Iterator[dict[str, str]]:
    """The documents of one part, a row group at a time."""
    with pq.ParquetFile(corpus / part) as file:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group, columns).to_pylist()


def _domain(url: str) -> str:
    """ "https://www.example.org:80/a" -> "example.org"; "unknown" if the URL can't be parsed."""
    try:
        return (urlsplit(url).hostname or "unknown").removeprefix("www.")
    except ValueError:
        return "unknown"
