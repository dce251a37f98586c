"""Reads Flax's files of weights, such as flax_model.msgpack, without Flax and JAX.

Such a file is a tree of MessagePack maps (msgpack.org). Its leaves are arrays (flax.serialization): an extension of
type 1 is the list (shape, name of the dtype, bytes), and an extension of type 3 a NumPy scalar in the same form. An
array of more than 1 GiB is a map of flat arrays. Names are translated as transformers 4 did it, in
`modeling_flax_pytorch_utils`.
"""

import io
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from data_pipeline.base.errors import FailedError, UserError, one_line
from data_pipeline.base.formatting import printable
from pretrain.models.state_dict_adapter import State

_BLOCK = 1 << 24  # bytes that are read at a time
_CHUNKED = "__msgpack_chunked_array__"
_OF_ARRAYS = (1, 3)  # types of extensions; type 2 is a complex number
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
# A value begins with a byte. It says the kind, and either holds the size too or says the form of the size behind it.
_SIZES = (
    *((0xC4, "byte string", "BHI"), (0xC7, "extension", "BHI"), (0xCC, "number", "BHIQ")),
    *((0xD9, "text", "BHI"), (0xDC, "list", "HI"), (0xDE, "map", "HI")),
)
_SIZE_BEHIND = {first + i: (kind, f">{form}") for first, kind, forms in _SIZES for i, form in enumerate(forms)}
_SIZE_WITHIN = {
    **{first: ("number", first) for first in range(0x80)},
    **{0x80 + size: ("map", size) for size in range(16)},
    **{0x90 + size: ("list", size) for size in range(16)},
    **{0xA0 + size: ("text", size) for size in range(32)},
    **{0xC2: ("number", 0), 0xC3: ("number", 1)},  # false and true
    **{0xD4 + power: ("extension", 1 << power) for power in range(5)},
}


@dataclass(frozen=True)
class _Array:
    """An array in a file, whose bytes lie in `pieces`: (position, length) each."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[int, int], ...]


def read(path: Path) -> State:
    """The tensors in `path` under the names that they have in PyTorch.

    Raises UserError, which names the value, for values that aren't arrays; FailedError if the file is damaged.
    """
    tensors: State = {}
    try:
        with path.open("rb") as file:
            for stored, array in _flat(_Reader(file, path).value(""), path):
                name, transposed = _in_pytorch(stored, array)
                if name in tensors:
                    raise ValueError(f"{name} is there twice")
                tensors[name] = _tensor(file, array, transposed)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, struct.error, RuntimeError) as error:
        raise FailedError(f"{path}: damaged: {printable(one_line(error))}") from None
    return tensors


class _Reader:
    """Reads MessagePack from a file, and leaves the bytes of arrays there."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file, self._path = file, path
        self._size = path.stat().st_size

    def value(self, name: str) -> Any:
        """The value at the file's position, called `name` in messages: a dictionary, a number or an array."""
        kind, size = self._head(name)
        if kind == "map":
            found = {}
            for _ in range(size):
                key = self._text()
                found[key] = self.value(f"{name}/{key}")
            return found
        if kind == "extension":
            return self._array(name, size)
        if kind == "number":
            return size
        raise self._refusal(name, f"a {kind}")

    def _head(self, name: str = "") -> tuple[str, int]:
        """The kind of the next value, and its size: a number's value, or how many bytes or values follow."""
        first = self._bytes(1)[0]
        if first in _SIZE_WITHIN:
            return _SIZE_WITHIN[first]
        if first in _SIZE_BEHIND:
            kind, form = _SIZE_BEHIND[first]
            return kind, struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        raise self._refusal(name, f"of MessagePack's type {first:#x}")

    def _array(self, name: str, size: int) -> _Array:
        code = self._bytes(1)[0]
        if code not in _OF_ARRAYS:
            raise self._refusal(name, "a complex number" if code == 2 else f"an extension of type {code}")
        end = self._file.tell() + size
        parts = self._head()
        dimensions = self._head()
        shape = tuple(self.value(name) for _ in range(dimensions[1]))
        dtype = self._text()
        if dtype not in _DTYPES:
            raise self._refusal(name, f"an array of {dtype}")
        kind, length = self._head()
        start = self._file.tell()
        if (parts, dimensions[0], kind) != (
            ("list", 3),
            "list",
            "byte string",
        ) or not start + length == end <= self._size:
            raise ValueError(f"{name.lstrip('/')} is no whole array")
        self._file.seek(end)
        return _Array(shape, _DTYPES[dtype], ((start, length),))

    def _text(self) -> str:
        kind, size = self._head()
        if kind != "text":
            raise ValueError(f"a {kind} in place of a text before byte {self._file.tell()}")
        return self._bytes(size).decode()

    def _bytes(self, size: int) -> bytes:
        if self._file.tell() + size > self._size:
            raise ValueError(f"it ends at byte {self._size}")
        return self._file.read(size)

    def _refusal(self, name: str, what: str) -> UserError:
        return UserError(f"{self._path}: {printable(name.lstrip('/')) or 'it'} is {printable(what)}, expected an array")


def _flat(tree: Any, path: Path, name: str = "") -> Iterator[tuple[str, _Array]]:
    """The arrays of a tree, by their names: encoder/block/0/… Shards have no tree, but such names."""
    if isinstance(tree, _Array):
        yield name, tree
    elif not isinstance(tree, dict):
        raise UserError(f"{path}: {printable(name) or 'it'} is a number, expected an array")
    elif _CHUNKED in tree:
        shape, chunks = ([tree[part][str(i)] for i in range(len(tree[part]))] for part in ("shape", "chunks"))
        yield name, _Array(tuple(shape), chunks[0].dtype, tuple(piece for chunk in chunks for piece in chunk.pieces))
    else:
        for key, value in tree.items():
            yield from _flat(value, path, f"{name}/{key}" if name else key)


def _in_pytorch(name: str, array: _Array) -> tuple[str, bool]:
    """The name in PyTorch, and whether the matrix there is the transpose."""
    layer, _, kind = name.replace("/", ".").rpartition(".")
    if kind == "kernel" and len(array.shape) == 2:
        return f"{layer}.weight", True
    return f"{layer}.weight" if kind in ("scale", "embedding") else name.replace("/", "."), False


def _tensor(file: BinaryIO, array: _Array, transposed: bool) -> Tensor:
    """Reads an array, block by block: no more memory is needed than the tensor's."""
    size = array.dtype.itemsize
    if math.prod(array.shape) * size != sum(length for _, length in array.pieces):
        raise ValueError(f"{array.shape} and {array.dtype} don't fit {sum(n for _, n in array.pieces)} bytes")
    tensor = torch.empty(array.shape[::-1] if transposed else array.shape, dtype=array.dtype)
    rows = tensor.T if transposed else tensor.view(-1, 1)
    row = rows.size(1) * size
    step = max(1, _BLOCK // max(1, row))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        content = _content(file, array.pieces, start * row, len(block) * row)
        block.copy_(torch.frombuffer(content, dtype=array.dtype).view(block.shape))
    return tensor


def _content(file: BinaryIO, pieces: tuple[tuple[int, int], ...], start: int, length: int) -> bytearray:
    """`length` bytes of the pieces behind one another, from the byte `start` on."""
    found = io.BytesIO()
    for position, size in pieces:
        if 0 <= start < size and found.tell() < length:
            file.seek(position + start)
            found.write(file.read(min(size - start, length - found.tell())))
            start = size
        start -= size
    return bytearray(found.getbuffer())
