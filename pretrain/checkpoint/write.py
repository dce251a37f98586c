"""Writes the files of a checkpoint, whether a run saves it or a model is imported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX, atomic_path, flush, sha256
from data_pipeline.foundation.safetensors_file import os_errors
from pretrain.checkpoint import rank_file
from pretrain.checkpoint.index import INDEX, File, Index, files_below
from pretrain.checkpoint.table import Piece, Table


def unfinished(directory: Path, rank: int) -> Path:
    """The temporary directory of a rank's tensors; their size there shows its progress."""
    return directory / f".{rank_file(rank)}{TEMPORARY_SUFFIX}"


def write_part(
    directory: Path,
    rank: int,
    tensors: dict[str, Tensor],
    pieces: dict[str, Piece],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, File]:
    """Writes the tensors of a rank by "STATE/NAME", and after them the table of its fragments.

    Empties `tensors` as soon as they are written. Calls `progress` as the file is read back. Returns the description
    of the tensors' file, by name.
    """
    path = unfinished(directory, rank) / f"{rank_file(rank)}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with os_errors():
        save_file(tensors, path)
    tensors.clear()
    progress()
    flush(path)
    file = File(path.stat().st_size, sha256(path, progress))
    path.rename(directory / path.name)
    path.parent.rmdir()
    Table(pieces, file).write(directory / f"{rank_file(rank)}.json")
    return {path.name: file}


def write_index(directory: Path, parts: dict[str, File], **values: Any) -> Index:
    """Writes the index, the last file of a checkpoint, with the other `values` of `Index`.

    `parts` describes the tensors' files, which are not read again.
    """
    files = parts | files_below(directory, but=parts)
    index = Index(files=dict(sorted(files.items())), **values)
    with atomic_path(directory / INDEX) as path:
        path.write_text(index.as_json())
    return index
