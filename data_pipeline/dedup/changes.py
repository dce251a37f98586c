"""What the steps so far have changed of a part: one table, so that no step applies the decisions of all earlier ones.

A row is a document that was dropped, or one that has another text or language than in the part. The rows are in the
order of the documents, and are read and written beside them, so that memory doesn't grow with the part.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.foundation.atomic import atomic_path
from data_pipeline.text.document import Document
from data_pipeline.text.tally import Tally

Row = tuple[int, Document, Document | None]
"""(number, document of a part, what is left of it)"""

_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("dropped", pa.bool_()),
        ("text", pa.large_string()),  # null: as in the part
        ("language", pa.string()),  # "": as in the part
    ]
)
_GROUP_CHARACTERS = 8_000_000
_CHARACTERS_OF_A_ROW = 100


class ChangesFile:
    """Writes a table of changes, a row group at a time."""

    def __init__(self, writer: pq.ParquetWriter):
        self._writer = writer
        self._rows: list[dict[str, Any]] = []
        self._characters = 0

    def add(self, number: int, document: Document, left: Document | None) -> None:
        """Notes what is `left` of document `number` of the part."""
        text = None if left is None or left.text == document.text else left.text
        language = "" if left is None or left.language == document.language else left.language
        if left is not None and text is None and not language:
            return
        self._rows.append({"document": number, "dropped": left is None, "text": text, "language": language})
        self._characters += _CHARACTERS_OF_A_ROW + len(text or "")
        if self._characters >= _GROUP_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, _SCHEMA))
        self._rows, self._characters = [], 0


@contextlib.contextmanager
def changes_file(path: Path, tally: Tally) -> Iterator[ChangesFile]:
    """A table that appears at `path`, with the counts of `tally`, if the block ends without an error."""
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, _SCHEMA, compression="zstd") as writer:
        changes = ChangesFile(writer)
        yield changes
        changes.flush()
        writer.add_key_value_metadata({"tally": json.dumps([tally, tally.examples], sort_keys=True)})


def changed(path: Path, rows: Iterable[Row], tally: Tally) -> Iterator[Row]:
    """`rows` of unchanged documents, in order, with what the table leaves of each.

    Adds what earlier steps have counted to `tally`.
    """
    with pq.ParquetFile(path) as file:
        tally.add(*json.loads(file.metadata.metadata[b"tally"]))
        changes = (row for group in range(file.num_row_groups) for row in file.read_row_group(group).to_pylist())
        change = next(changes, None)
        for number, document, left in rows:
            if change and change["document"] == number:
                text, language = change["text"], change["language"] or document.language
                left = None if change["dropped"] else replace(document, text=text or document.text, language=language)
                change = next(changes, None)
            yield number, document, left
