"""What a step that needs no other part's keys decided about the documents of one part."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.foundation.atomic import atomic_path
from data_pipeline.text.document import Document
from data_pipeline.text.tally import Tally

_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("rule", pa.string()),
        ("example", pa.string()),
        ("language", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The `rule` that drops a document, with an `example` for the report; the document's `language`, if the step
    determined it."""

    rule: str = ""
    example: str = ""
    language: str = ""


class Verdicts:
    """Verdicts on documents by their numbers; a document without one stays as it is."""

    def __init__(self, verdicts: dict[int, Verdict]):
        self._verdicts = verdicts

    def without(self, number: int, document: Document, tally: Tally, min_sentences: int) -> Document | None:
        """Document `number` with its language; None if it is dropped, which is counted."""
        verdict = self._verdicts.get(number, Verdict())
        if verdict.rule:
            tally.drop(verdict.rule, verdict.example)
            return None
        return replace(document, language=verdict.language) if verdict.language else document

    def write(self, path: Path) -> None:
        rows = [{"document": number, **asdict(verdict)} for number, verdict in sorted(self._verdicts.items())]
        with atomic_path(path) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), temporary, compression="zstd")

    @classmethod
    def read(cls, path: Path) -> "Verdicts":
        return cls({row.pop("document"): Verdict(**row) for row in pq.read_table(path).to_pylist()})
