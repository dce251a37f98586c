"""Blocks: a block has up to some thousand rows as flat, named arrays, and is one WebDataset sample of a shard.

With noise at load, a block has "tokens", "row_offsets" (rows + 1,), "document_offsets" (starts of documents in
"tokens"), and an array (rows,) for each column that the objective needs. With noise at build, it has "inputs",
"input_offsets", "targets", "target_offsets" and the examples' optional arrays, which are as flat as their inputs or
targets, with the smallest dtype that fits.

`Blocks` is the index of the blocks of a split.
"""

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data_pipeline.corpus.objectives.objective import Examples, Padded

Block = dict[str, np.ndarray]
_KEY_DIGITS = 12
_NPY_HEADER = 1024  # bytes; the header of a one-dimensional array takes 128
# NumPy reads a header with Python's parser, which in Python 3.11 may raise SystemError if two threads use it at once.
_PARSING = threading.Lock()
# Optional arrays with a value for each token: the side they belong to, and its offsets.
_OF_TOKENS = {
    "predicted": ("targets", "target_offsets"),
    "input_segments": ("inputs", "input_offsets"),
    "target_segments": ("targets", "target_offsets"),
}


def of_rows(tokens: np.ndarray, offsets: np.ndarray, documents: np.ndarray, columns: dict[str, np.ndarray]) -> Block:
    """The block of the rows of `tokens` at `offsets` (rows + 1,). `documents`: the starts of all documents."""
    first, last = int(offsets[0]), int(offsets[-1])
    inside = documents[np.searchsorted(documents, first) : np.searchsorted(documents, last)]
    return {"tokens": tokens[first:last], "row_offsets": offsets - first, "document_offsets": inside - first, **columns}


def of_examples(examples: Examples) -> Block:
    """The block of rows to which the objective was applied."""
    block: Block = {}
    for name, side in (("input", examples.inputs), ("target", examples.targets)):
        block[f"{name}s"] = side.values[side.filled]
        block[f"{name}_offsets"] = np.append(0, np.cumsum(side.lengths)).astype(np.int64)
    for name, values in examples.optional.items():
        if name in _OF_TOKENS:
            values = values[getattr(examples, _OF_TOKENS[name][0]).filled]
        block[name] = values.astype(np.min_scalar_type(int(values.max(initial=0))))
    return block


def count_rows(block: Block) -> int:
    return len(block["row_offsets"] if "row_offsets" in block else block["input_offsets"]) - 1


def count_tokens(block: Block) -> int:
    """Tokens of the rows, or of inputs and targets together."""
    return sum(block[name].size for name in ("tokens", "inputs", "targets") if name in block)


def rows_in(blocks: list[Block], rows: list[int]) -> Padded:
    """Tokens of row `rows[i]` of `blocks[i]`, for each i."""
    return _gather(blocks, rows, "tokens", "row_offsets")


def column_in(blocks: list[Block], rows: list[int], name: str) -> np.ndarray:
    """(n,) values of the column `name`: of row `rows[i]` of `blocks[i]`, for each i."""
    return np.array([block[name][row] for block, row in zip(blocks, rows, strict=True)])


def examples_in(blocks: list[Block], rows: list[int]) -> Examples:
    """Row `rows[i]` of `blocks[i]`, for each i, of blocks with noise at build."""
    extra = {
        name: _gather(blocks, rows, name, offsets).values
        for name, (_, offsets) in _OF_TOKENS.items()
        if name in blocks[0]
    }
    if "predicted" in extra:
        extra["predicted"] = extra["predicted"].astype(bool)
    inputs, targets = (_gather(blocks, rows, f"{side}s", f"{side}_offsets") for side in ("input", "target"))
    return Examples(inputs, targets, **extra)


def _gather(blocks: list[Block], rows: list[int], name: str, offsets: str) -> Padded:
    parts = []
    for block, row in zip(blocks, rows, strict=True):
        bounds = block[offsets]
        parts.append(block[name][bounds[row] : bounds[row + 1]])
    return Padded.of_flat(np.concatenate(parts), np.array([len(part) for part in parts], dtype=np.int64))


def add(shard: tarfile.TarFile, block: Block, first_row: int) -> None:
    """Adds a block to an open shard, as a WebDataset sample: a member `<first row>.<name>.npy` for each array.

    The bytes are those of `webdataset.TarWriter(…, mtime=0)`, whose package would import PyTorch: 1.1 s and 190 MB.
    """
    for name in sorted(f"{name}.npy" for name in block):
        content = io.BytesIO()
        np.lib.format.write_array(content, block[name.removesuffix(".npy")], version=(1, 0), allow_pickle=False)
        member = tarfile.TarInfo(f"{first_row:0{_KEY_DIGITS}d}.{name}")
        member.size, member.mode, member.uname, member.gname = content.tell(), 0o444, "bigdata", "bigdata"
        content.seek(0)
        shard.addfile(member, content)


def decode_block(content: bytes | memoryview) -> Block:
    """The block with these bytes in the tar. Its arrays are views of `content`. Raises ValueError for other bytes."""
    view = memoryview(content)
    block: Block = {}
    at = 0
    while at < len(view):
        try:
            member = tarfile.TarInfo.frombuf(bytes(view[at : at + tarfile.BLOCKSIZE]), "utf-8", "strict")
        except tarfile.HeaderError as error:
            raise ValueError(f"no member of a tar at byte {at}: {error}") from None
        start = at + tarfile.BLOCKSIZE
        block[member.name.split(".", 1)[1].removesuffix(".npy")] = _array(view[start : start + member.size])
        at = start + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return block


def _array(content: memoryview) -> np.ndarray:
    """Like `np.load`, without a copy and without pickles."""
    header = io.BytesIO(content[:_NPY_HEADER])
    if np.lib.format.read_magic(header) != (1, 0):
        raise ValueError("not an array of npy format 1.0")
    with _PARSING:
        shape, _, dtype = np.lib.format.read_array_header_1_0(header)
    if dtype.hasobject or len(shape) != 1:
        raise ValueError(f"expected an array of numbers of one dimension, got {dtype} {shape}")
    return np.frombuffer(content, dtype, count=shape[0], offset=header.tell())


@dataclass(frozen=True)
class Blocks:
    """The blocks of one split, as columns (n,): where each block is, and its rows. 68 bytes for each block.

    `shard`: indices into the names `shards`. `sha256`: (n, 32) uint8.
    """

    shards: list[str]
    shard: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    first_row: np.ndarray
    rows: np.ndarray
    sha256: np.ndarray

    @classmethod
    def of_table(cls, table: pa.Table) -> "Blocks":
        shard = table["shard"].combine_chunks().dictionary_encode()
        digests = bytes.fromhex("".join(table["sha256"].to_pylist()))
        return cls(
            shards=shard.dictionary.to_pylist(),
            shard=shard.indices.to_numpy(),
            sha256=np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32),
            **{name: table[name].to_numpy() for name in ("offset", "length", "first_row", "rows")},
        )

    def of_shard(self, name: str) -> np.ndarray:
        """Numbers of the blocks of one shard."""
        return np.flatnonzero(self.shard == self.shards.index(name)) if name in self.shards else np.zeros(0, np.int64)

    def by_shard(self, names: Iterable[str]) -> dict[str, "Blocks"]:
        """The blocks of each of the shards `names` alone."""
        order = np.argsort(self.shard, kind="stable")
        ends = np.searchsorted(self.shard[order], np.arange(1, len(self.shards)))
        numbers = dict(zip(self.shards, np.split(order, ends), strict=False))
        columns = (self.offset, self.length, self.first_row, self.rows, self.sha256)
        found = {}
        for name in names:
            own = numbers.get(name, order[:0])
            found[name] = Blocks([name], np.zeros_like(own), *(values[own] for values in columns))
        return found

    def is_whole(self, number: int, content: bytes | memoryview) -> bool:
        return hashlib.sha256(content).digest() == self.sha256[number].tobytes()
