"""Writes safetensors files at once or piece by piece, and reads slices of their arrays. A full disk raises OSError."""

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from data_pipeline.base.errors import FailedError, one_line, os_errors
from data_pipeline.base.store import ReadRanges, Store

_DTYPES = {"U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "I64": np.int64}
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes a file of `arrays`, with `metadata` in its header."""
    with os_errors():
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, metadata)


def write_in_order(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file of `arrays`, whose values have equal sizes, in this order. `Arrays` reads the first with the
    header, if they are small."""
    with growing_arrays(path, {name: (array.dtype, array.shape) for name, array in arrays.items()}) as append:
        for name, array in arrays.items():
            append(name, array)


class Arrays:
    """The arrays of a file; only what is asked for is read. Raises FailedError if the file is damaged.

    The first request reads the header and, up to `Store.least_read` bytes, arrays.
    Each request opens the file. `opened` is for several requests to a file that needn't stay open after them.
    """

    def __init__(self, store: Store, name: str, read: ReadRanges | None = None):
        self._where, self._read = store.at(name), read or (lambda ranges: store.ranges(name, ranges))
        try:
            (head,) = self._read([(0, store.least_read)])
            (size,) = struct.unpack_from("<Q", head)
            self._start = 8 + size
            if self._start > len(head):
                head += self._read([(len(head), self._start)])[0]
            header = json.loads(head[8 : self._start])
            self._head = head
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._dtypes = {array: np.dtype(_DTYPES[one["dtype"]]) for array, one in header.items()}
            self._shapes = {array: tuple(one["shape"]) for array, one in header.items()}
            self._at = {array: self._start + one["data_offsets"][0] for array, one in header.items()}
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise self._damage(one_line(error)) from None

    @classmethod
    @contextlib.contextmanager
    def opened(cls, store: Store, name: str) -> Iterator["Arrays"]:
        """The arrays of a file that a folder opens once for all requests within the block."""
        with store.opened(name) as read:
            yield cls(store, name, read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __contains__(self, array: str) -> bool:
        return array in self._shapes

    def shape(self, array: str) -> tuple[int, ...]:
        return self._shapes[array]

    def dtype(self, array: str) -> np.dtype:
        return self._dtypes[array]

    def __getitem__(self, array: str) -> np.ndarray:
        """A whole array."""
        return self.slices((array, 0, self._shapes[array][0]))[0]

    def slices(self, *wanted: tuple[str, int, int]) -> list[np.ndarray]:
        """`array[start:stop]` for each (array, start, stop) of `wanted`, in one request."""
        strides = [self._dtypes[array].itemsize * math.prod(self._shapes[array][1:]) for array, _, _ in wanted]
        ranges = [
            (self._at[array] + start * stride, self._at[array] + stop * stride)
            for (array, start, stop), stride in zip(wanted, strides, strict=True)
        ]
        missing = [(first, last) for first, last in ranges if last > len(self._head)]
        read = iter(self._read(missing) if missing else ())
        found = []
        for (array, start, stop), (first, last) in zip(wanted, ranges, strict=True):
            content = next(read) if last > len(self._head) else self._head[first:last]
            if len(content) != last - first:
                raise self._damage(f"it ends at byte {first + len(content)}")
            found.append(np.frombuffer(content, self._dtypes[array]).reshape(stop - start, *self._shapes[array][1:]))
        return found

    def _damage(self, reason: str) -> FailedError:
        way_out = "data-pipeline build CORPUS.yaml --repair writes it again"
        return FailedError(f"{self._where}: damaged: {reason}; {way_out}")


@contextlib.contextmanager
def growing_arrays(
    path: Path, shapes: Mapping[str, tuple[Any, tuple[int, ...]]]
) -> Iterator[Callable[[str, np.ndarray], None]]:
    """A safetensors file for arrays of `shapes`, (dtype, shape) by name; arrays of large values come first in the file.
    Yields a function that appends values to the array of a name; the arrays grow piece by piece and in any order.

    Raises ValueError if an array gets more values than its shape has room for, or isn't full at the end of the block.
    """
    dtypes = {name: np.dtype(kind) for name, (kind, _) in shapes.items()}
    header: dict[str, dict[str, object]] = {}
    at: dict[str, int] = {}
    ends: dict[str, int] = {}
    end = 0
    for name in sorted(shapes, key=lambda name: -dtypes[name].itemsize):  # so all are aligned
        dtype, shape = dtypes[name], shapes[name][1]
        at[name], end = end, end + dtype.itemsize * math.prod(shape)
        ends[name] = end
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [at[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        start = file.write(struct.pack("<Q", len(text)) + text)

        def append(name: str, values: np.ndarray) -> None:
            content = np.ascontiguousarray(values, dtypes[name])
            if at[name] + content.nbytes > ends[name]:
                raise ValueError(f"{name}: more values than its shape has room for")
            file.seek(start + at[name])
            file.write(content.data if content.size else b"")
            at[name] += content.nbytes

        yield append
    if short := [name for name in header if at[name] != ends[name]]:
        raise ValueError(f"{', '.join(short)}: fewer values than the shape says")
