"""Which documents of one part contain items of evaluation sets."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.foundation.atomic import atomic_path
from data_pipeline.text.document import Document
from data_pipeline.text.tally import Tally

_SCHEMA = pa.schema([("document", pa.int64()), ("dropped", pa.bool_()), ("evidence", pa.string())])


class Contaminated:
    """The documents, by number, that earlier steps have `dropped`, or that are contaminated, with the evidence:
    the item and the words that were found."""

    def __init__(self, dropped: Iterable[int], evidence: dict[int, str]):
        self.dropped = set(dropped)
        self._evidence = evidence

    def without(self, number: int, document: Document, tally: Tally, min_sentences: int) -> Document | None:
        """Document `number`; None if it is contaminated, which is counted."""
        if number in self._evidence:
            tally.drop("contaminated", self._evidence[number])
            return None
        return document

    def write(self, path: Path) -> None:
        rows = [(number, True, "") for number in self.dropped]
        rows += [(number, False, evidence) for number, evidence in self._evidence.items()]
        columns = [[row[column] for row in sorted(rows)] for column in range(3)]
        with atomic_path(path) as temporary:
            pq.write_table(pa.table(columns, schema=_SCHEMA), temporary, compression="zstd")

    @classmethod
    def read(cls, path: Path) -> "Contaminated":
        rows = pq.read_table(path).to_pylist()
        dropped = {row["document"] for row in rows if row["dropped"]}
        return cls(dropped, {row["document"]: row["evidence"] for row in rows if not row["dropped"]})
