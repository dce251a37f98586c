"""Writes the files of a checkpoint, whether a run saves it or a model is imported."""

import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX, atomic_path, flush
from data_pipeline.foundation.safetensors_file import os_errors
from pretrain.checkpoint import BUFFERS, rank_file
from pretrain.checkpoint.index import INDEX, File, Index, MappedFile, Origin, Piece, Table, files_below
from pretrain.run.train_state import TrainState

_BYTES_AT_A_TIME = 1 << 22
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # as the safetensors format calls them


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

    Empties `tensors` as soon as they are written. Calls `progress` as they are. Returns the description of the
    tensors' file, by name.
    """
    path = unfinished(directory, rank) / f"{rank_file(rank)}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _write_tensors(path, tensors, progress)
    tensors.clear()
    flush(path)
    path.rename(directory / path.name)
    path.parent.rmdir()
    Table(pieces, file).write(directory / f"{rank_file(rank)}.json")
    return {path.name: file}


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """The beginning of a safetensors file; `tensors` follow one after the other."""
    about, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        about[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_tensors(path: Path, tensors: dict[str, Tensor], progress: Callable[[], None]) -> File:
    """Writes a safetensors file and computes its sha256 on the way, so that nothing is read back."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so all are aligned
    ordered = {name: tensors[name] for name in names}
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for content in itertools.chain([memoryview(header(ordered))], map(_bytes, ordered.values())):
            size += len(content)
            for begin in range(0, len(content), _BYTES_AT_A_TIME):
                block = content[begin : begin + _BYTES_AT_A_TIME]
                digest.update(block)
                file.write(block)
                progress()
    return File(size, digest.hexdigest())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


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
        step=train_state.step,
        position=train_state.position,
        consumed=origin.mixture.consumed(train_state.position),
        skipped=train_state.skipped,
        config_fingerprint=origin.config_fingerprint,
        identity=origin.identity,
        world_size=origin.ranks,
        zero_stage=origin.zero_stage,
        health=train_state.health,
        unlogged=train_state.unlogged,
        callbacks=train_state.callbacks,
        weights=weights,
    )


def write_index(directory: Path, parts: Mapping[str, File | MappedFile], **values: Any) -> Index:
    """Writes the index, the last file of a checkpoint, with the other `values` of `Index`.

    `parts` describes the tensors' files, which are not read again.
    """
    files = {**parts, **files_below(directory, but=parts)}
    index = Index(files=dict(sorted(files.items())), **values)
    with atomic_path(directory / INDEX) as path:
        path.write_text(index.as_json())
    return index


def write_buffers(buffers: Mapping[str, Tensor], directory: Path) -> None:
    """Writes the buffers that aren't all zeros, in fp32."""
    found = {name: buffer.float().cpu().contiguous() for name, buffer in buffers.items() if buffer.any()}
    if found:
        with os_errors():
            save_file(found, directory / BUFFERS)
