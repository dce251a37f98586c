"""safetensors files: written at once or a piece at a time. A full disk raises OSError, as for any other file."""

import contextlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from data_pipeline.foundation.atomic import atomic_file, atomic_path

_DTYPES = {"U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "I64": np.int64}
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turns a SafetensorError that an operating system error caused into that OSError."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes a file of `arrays`, which appears whole, with `metadata` in its header."""
    with atomic_path(path) as temporary, os_errors():
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, metadata)


def dtype_of(array: Any) -> Any:
    """The dtype of an array in an open file (`get_slice`)."""
    return _DTYPES[array.get_dtype()]


def part_of(array: Any, start: int, stop: int) -> np.ndarray:
    """`array[start:stop]` of a one-dimensional array in an open file; safetensors refuses some empty ranges."""
    return array[start:stop] if stop > start else np.zeros(0, dtype_of(array))


class GrowingArrays:
    """Arrays whose final shapes are known, written to `file` a piece at a time, in any order."""

    def __init__(self, file: BinaryIO, shapes: Mapping[str, tuple[Any, tuple[int, ...]]]):
        self._file = file
        self._dtypes = {name: np.dtype(kind) for name, (kind, _) in shapes.items()}
        header: dict[str, dict[str, object]] = {}
        self._at: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        end = 0
        for name in sorted(shapes, key=lambda name: (-self._dtypes[name].itemsize, name)):  # so all are aligned
            dtype, shape = self._dtypes[name], shapes[name][1]
            self._at[name], end = end, end + dtype.itemsize * math.prod(shape)
            self._ends[name] = end
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [self._at[name], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)
        self._start = 8 + len(text)

    def append(self, name: str, values: np.ndarray) -> None:
        """Writes `values` behind those of the array `name` that were written before."""
        content = np.ascontiguousarray(values, self._dtypes[name])
        if self._at[name] + content.nbytes > self._ends[name]:
            raise ValueError(f"{name}: more values than its shape has room for")
        self._file.seek(self._start + self._at[name])
        self._file.write(content.data if content.size else b"")
        self._at[name] += content.nbytes

    def check(self) -> None:
        """Raises ValueError if an array isn't full."""
        if short := [name for name, at in self._at.items() if at != self._ends[name]]:
            raise ValueError(f"{', '.join(short)}: fewer values than the shape says")


@contextlib.contextmanager
def growing_arrays(path: Path, shapes: Mapping[str, tuple[Any, tuple[int, ...]]]) -> Iterator[GrowingArrays]:
    """A safetensors file that appears at `path` if the block ends with all arrays full. `shapes`: (dtype, shape)."""
    with atomic_file(path) as file:
        arrays = GrowingArrays(file, shapes)
        yield arrays
        arrays.check()
