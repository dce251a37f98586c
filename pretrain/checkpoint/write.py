"""Writes the files of a checkpoint, whether a run saves it or a model is imported."""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX, atomic_file, atomic_path, flush, sha256
from data_pipeline.foundation.safetensors_file import os_errors
from pretrain.checkpoint import BUFFERS, rank_file
from pretrain.checkpoint.index import INDEX, File, Index, MappedFile, Origin, Piece, Table
from pretrain.run.train_state import TrainState

_BLOCK = 1 << 22  # bytes
_BLOCKS_BETWEEN_FLUSHES = 1 << 8


def header(shapes: Mapping[str, list[int]]) -> bytes:
    """The beginning of a safetensors file of fp32 tensors, whose elements follow in the same order."""
    about, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        about[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_part(
    directory: Path, rank: int, image: Tensor, pieces: dict[str, Piece], progress: Callable[[], None]
) -> None:
    """Writes a rank's safetensors file, whose bytes `image` (bytes,) has, and after it the table of its fragments.

    Computes the sha256 on the way, so that nothing is read back. Calls `progress` after each block, which is on the
    disk soon: a write that gets on can be told from one that hangs.
    """
    content, digest = image.numpy().data, hashlib.sha256()
    with atomic_file(directory / f"{rank_file(rank)}.safetensors") as opened:
        for number, begin in enumerate(range(0, len(content), _BLOCK), 1):
            block = content[begin : begin + _BLOCK]
            digest.update(block)
            opened.write(block)
            if number % _BLOCKS_BETWEEN_FLUSHES == 0:
                os.fsync(opened.fileno())
            progress()
    Table(pieces, File(len(content), digest.hexdigest())).write(directory / f"{rank_file(rank)}.json")


def write_run_index(
    directory: Path,
    parts: Mapping[str, File | MappedFile],
    origin: Origin,
    train_state: TrainState,
    weights: str | None = None,
) -> Index:
    """`write_index` for a run that stands at `train_state`. `weights`: their fingerprint."""
    return write_index(
        directory,
        parts,
        **vars(train_state),
        consumed=origin.mixture.consumed(train_state.position),
        config_fingerprint=origin.config_fingerprint,
        identity=origin.identity,
        world_size=origin.ranks,
        zero_stage=origin.zero_stage,
        weights=weights,
    )


def write_index(directory: Path, parts: Mapping[str, File | MappedFile], **values: Any) -> Index:
    """Writes the index, the last file of a checkpoint, with the other `values` of `Index`.

    `parts` describes the tensors' files, which are not read again.
    """
    files = dict(parts)
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_file() and name not in parts and not name.endswith(TEMPORARY_SUFFIX):
            flush(path)
            files[name] = File(path.stat().st_size, sha256(path))
    index = Index(files=dict(sorted(files.items())), **values)
    with atomic_path(directory / INDEX) as path:
        path.write_text(index.as_json())
    return index


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file. Raises OSError if the disk refuses."""
    with os_errors():
        save_file(tensors, path)


def write_buffers(buffers: Mapping[str, Tensor], directory: Path) -> None:
    """Writes the buffers that aren't all zeros, in fp32."""
    if found := {name: buffer.float().cpu().contiguous() for name, buffer in buffers.items() if buffer.any()}:
        write_tensors(found, directory / BUFFERS)
