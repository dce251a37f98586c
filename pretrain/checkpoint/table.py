"""rank-00000.json: the content of the safetensors file beside it."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat, NonNegativeInt

from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX, flush
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.json_file import read_json
from pretrain.checkpoint import rank_file
from pretrain.checkpoint.index import File

Size = Annotated[int, Field(ge=0, lt=2**62)]


@dataclass(frozen=True)
class Piece:
    """Elements `start` … `start` + `size` − 1 of a flattened parameter of `shape`.

    `scalars` are the optimizer's scalars for the parameter. `states` names the optimizer states with the parameter's
    layout; `whole` names those of other shapes, which this rank writes for the whole parameter.
    """

    start: Size
    size: Size
    shape: list[NonNegativeInt]
    scalars: dict[str, FiniteFloat] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """The content of a rank's .json file: `fragments` by parameter name, and the safetensors `file`."""

    fragments: dict[str, Piece]
    file: File | None = None

    def write(self, path: Path) -> None:
        """Writes the table. The rename comes last, because rank 0 may rename the whole directory after it."""
        unnamed = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
        unnamed.write_text(json.dumps(asdict(self)))
        flush(unnamed)
        unnamed.replace(path)


def read_tables(directory: Path, ranks: int) -> dict[str, Table]:
    """The tables of a checkpoint that `ranks` ranks wrote, by the name of their safetensors file.

    Raises FailedError if one is damaged, or if the pieces don't cover each parameter exactly once.
    """
    tables = {
        f"{rank_file(rank)}.safetensors": read_json(directory / f"{rank_file(rank)}.json", Table)
        for rank in range(ranks)
    }
    pieces: dict[str, list[Piece]] = {}
    for table in tables.values():
        for name, piece in table.fragments.items():
            pieces.setdefault(name, []).append(piece)
    for name, parts in pieces.items():
        if problem := _mismatch(parts):
            raise FailedError(f"{directory}: damaged: the tables of the ranks disagree on {name}: {problem}")
    return tables


def _mismatch(pieces: list[Piece]) -> str | None:
    """Why the pieces don't make up one parameter; None if they do."""
    first = pieces[0]
    for piece in pieces:
        if (piece.shape, piece.states, piece.scalars) != (first.shape, first.states, first.scalars):
            return "shapes or states differ"
    covered = 0
    for piece in sorted((piece for piece in pieces if piece.size), key=lambda piece: piece.start):
        if piece.start != covered:
            return f"element {min(covered, piece.start)} is {'missing' if piece.start > covered else 'there twice'}"
        covered += piece.size
    size = math.prod(first.shape)
    return None if covered == size else f"{covered} elements for the shape {first.shape}"
