"""`lineage.parquet`: the files that a corpus was made from, and those of its documents. Training reads neither."""

from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.foundation.arrow_tables import table_of
from data_pipeline.foundation.errors import FailedError, one_line
from data_pipeline.foundation.json_file import PathBelow, adapter

LINEAGE = "lineage.parquet"
_INPUT, _DOCUMENTS = "input", "documents"
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("kind", "source", "name")]
    + [("bytes", pa.int64()), ("sha256", pa.string()), ("status", pa.string()), ("unchecked", pa.bool_())]
)


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
class Lineage:
    """A row of the file for each of these, in this order."""

    inputs: list[InputEntry] = field(default_factory=list)
    documents: list[DocumentsEntry] = field(default_factory=list)

    def table(self) -> pa.Table:
        inputs = [
            (_INPUT, one.source, one.file, one.bytes, one.sha256, one.status, one.unchecked) for one in self.inputs
        ]
        documents = [(_DOCUMENTS, None, one.name, one.bytes, one.sha256, None, None) for one in self.documents]
        return table_of([*inputs, *documents], _SCHEMA)

    @classmethod
    def read(cls, content: bytes, path: str) -> "Lineage":
        """Raises FailedError, which names `path`, for what isn't the content of such a file."""
        try:
            rows = pq.read_table(pa.BufferReader(content)).to_pylist()
            inputs = [{**row, "file": row["name"]} for row in rows if row["kind"] == _INPUT]
            documents = [row for row in rows if row["kind"] == _DOCUMENTS]
            return adapter(cast(Any, cls)).validate_python({"inputs": inputs, "documents": documents})
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise FailedError(f"{path}: damaged: {one_line(error)}") from None
