"""`lineage.parquet`: the input files of a corpus and its files of documents, which training doesn't need."""

from dataclasses import astuple, dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.base.arrow_tables import table_of
from data_pipeline.base.errors import FailedError, one_line
from data_pipeline.base.json_file import PathBelow, adapter

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
    """The rows of the file: inputs, then documents."""

    inputs: list[InputEntry]
    documents: list[DocumentsEntry]

    def table(self) -> pa.Table:
        rows = [(_INPUT, *astuple(one)) for one in self.inputs]
        rows += [(_DOCUMENTS, None, *astuple(one), None, None) for one in self.documents]
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
