"""Functions that the kernels of `flash.py` share, in the manner of FlashAttention-2 (Dao 2023).

A program works on one tile of queries or keys and loops over the other side, so that no matrix of queries × keys
exists. Normalisers are log2 of the softmax's sums.

Index names: `at_q` and `at_k` are positions of queries and keys, already shaped to broadcast over a tile. A bias is
read by its diagonal at_k − at_q, so a tile of M × N takes M + N − 1 neighbouring values. Queries and keys see each
other if their labels are equal; MASKED is off where a tile is known to be visible as a whole. Positions beyond the
queries need no mask: their rows aren't stored, and their normaliser of ∞ lets them give no gradient.

`settings` are (queries, keys, before, after, scale, softcap): the lengths; how many keys a query sees before its own
position and after it, None without a limit; the factor of logits; and their soft cap, None without.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pretrain.models.kernels import GRANULE as _GRANULE

LOG2_E = tl.constexpr(1.4426950408889634)
GRANULE = tl.constexpr(_GRANULE)  # tiles are multiples or divisors of it
# Triton would compile a kernel anew for sizes that are 1 or multiples of 16, which lengths are at random. Here they
# only decide which elements a tile leaves out, for which it makes no difference.
UNSPECIALIZED = {
    "do_not_specialize": ["diagonals_stride", "heads", "queries", "keys", "before", "after"],
    "do_not_specialize_on_alignment": ["DIAGONALS"],
}


class Tiles(NamedTuple):
    """Rows and columns of the logits that a program holds at a time, its warps, and the depth of its prefetching."""

    rows: int
    columns: int
    warps: int
    stages: int


# In bf16, by the bytes of shared memory that a program may have, and the widest head. In the forms of attention that
# families take none spills registers (docs/results/attention-on-gpus.md). Those of an H100 for heads of 64 are the
# fastest measured (docs/results/gpu.md).
TILES = {
    101_376: {  # RTX 3090, 4090 and 5090, L40S
        "forward": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(64, 32, 8, 2)},
        "backward_queries": {64: Tiles(32, 32, 4, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
        "backward_keys": {64: Tiles(32, 64, 8, 1), 128: Tiles(32, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
    },
    166_912: {  # A100
        "forward": {64: Tiles(128, 64, 8, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 8, 2)},
        "backward_queries": {64: Tiles(32, 32, 4, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
        "backward_keys": {64: Tiles(32, 64, 8, 2), 128: Tiles(32, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
    },
    232_448: {  # H100
        "forward": {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 8, 2)},
        "backward_queries": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
        "backward_keys": {64: Tiles(32, 64, 4, 3), 128: Tiles(32, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
    },
}
_TILES_IN_FP32 = Tiles(32, 32, 4, 2)  # it has no tensor cores


@cache
def shared_memory() -> int:
    """The bytes of it that a program may have on the GPU at hand, or on an A100 where there is none."""
    if not torch.cuda.is_available():
        return 166_912
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return device.shared_memory_per_block_optin  # type: ignore[attr-defined]  # PyTorch's stubs lack it


def tile_sizes(kernel: str, dtype: torch.dtype, d_kv: int, offered: int | None = None) -> Tiles:
    """The tiles of `kernel` for heads of `d_kv` numbers where a program may have `offered` bytes of shared memory,
    by default on the GPU at hand. Where it offers less than any tiles need, Triton refuses them in one line."""
    if dtype == torch.float32:
        return _TILES_IN_FP32
    offered = offered or shared_memory()
    tiles = TILES[max((needed for needed in TILES if needed <= offered), default=min(TILES))][kernel]
    return tiles[min(width for width in tiles if width >= d_kv)]


@triton.jit
def load_tile(base, at, stride, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(len(at), BLOCK_D) rows `at` of a head; zeros outside."""
    column = tl.arange(0, BLOCK_D)
    inside = at[:, None] < length
    if D != BLOCK_D:
        inside = inside & (column[None, :] < D)
    return tl.load(base + at[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(base, at, stride, length, tile, D: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    inside = (at[:, None] < length) & (column[None, :] < D)
    tl.store(base + at[:, None] * stride + column[None, :], tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def offset(base, distance):
    """`base` moved by `distance` elements; None if there is none."""
    if base is None:
        return  # Triton 3.6 can't return the constant None
    else:
        return base + distance


@triton.jit
def load_labels(labels, at, length):
    """Labels in the shape of `at`; None if there are none."""
    if labels is None:
        return
    else:
        return tl.load(labels + at, mask=at < length)


@triton.jit
def spread(numbers, at, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) of `numbers` (any length) at the indices `at`, through shared memory.

    `tl.load` from an address for each number means the same, but Triton prefetches such a load by a copy of 4 bytes for
    each number of the tile: the forward pass then took twice as long on an H200 (docs/results/gpu.md).
    """
    return tl.reshape(tl.gather(numbers, tl.reshape(at, [ROWS * COLUMNS]), 0), [ROWS, COLUMNS])


@triton.jit
def in_each_row(numbers, ROWS: tl.constexpr):
    """(ROWS, len(numbers)), each row of which is `numbers`."""
    COLUMNS: tl.constexpr = numbers.shape[0]
    return spread(numbers, tl.zeros((ROWS, 1), tl.int32) + tl.arange(0, COLUMNS)[None, :], ROWS, COLUMNS)


@triton.jit
def tile_of_logits(
    rows, columns, at_q, at_k, label_q, label_k, diagonals, lowest, settings,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(rows · columnsᵀ with the bias, −∞ at hidden pairs; the slope of the soft cap). Rows may be queries or keys.
    `lowest`: the tile's lowest diagonal, that of its last query and first key."""
    queries, keys, before, after, scale, softcap = settings
    logits = tl.dot(rows, tl.trans(columns), input_precision=PRECISION) * scale
    slope = 1.0
    if softcap is not None:
        share = 1 - 2 / (1 + tl.exp2(logits * (2 * LOG2_E / softcap)))  # tanh(logits / softcap)
        logits, slope = softcap * share, 1 - share * share
    if diagonals is not None:
        ROWS: tl.constexpr = rows.shape[0]
        COLUMNS: tl.constexpr = columns.shape[0]
        number = tl.arange(0, 2 * max(ROWS, COLUMNS))
        strip = tl.load(diagonals + lowest + number, mask=number < ROWS + COLUMNS - 1, other=0.0)
        logits += spread(strip, at_k - at_q - lowest, ROWS, COLUMNS)
    if MASKED:
        seen = at_k < keys
        distance = at_k - at_q - (keys - queries)
        if before is not None:
            seen = seen & (distance >= -before)
        if after is not None:
            seen = seen & (distance <= after)
        if label_q is not None:
            seen = seen & (label_q == label_k)
        logits = tl.where(seen, logits, float("-inf"))
    return logits, slope


@triton.jit
def mixed(x):
    """uint32 to uint32, every bit of the result depending on every bit of `x`; a bijection of low bias (Wellons)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def seed_of_head(SEED, row):
    """The seed of one head of one row of the batch; None without dropout."""
    if SEED is None:
        return
    else:
        return mixed(tl.load(SEED).to(tl.uint32) + row.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def drop(weights, seed, at_q, at_k, keys, dropout):
    """`weights` with a share of `dropout` set to 0 and the others grown; a function of seed and position alone."""
    if seed is not None:
        draws = mixed(mixed((at_q * keys + at_k).to(tl.uint32)) + seed)
        kept = (draws >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24)) >= dropout
        weights = tl.where(kept, weights / (1.0 - dropout), 0.0)
    return weights


@triton.jit
def range_of_tile(ranges, batch, first, length, BLOCK: tl.constexpr):
    """Start and end of what any of the BLOCK positions from `first` on sees; `ranges` is (batch, 2, granules)."""
    granules = tl.cdiv(length, GRANULE)
    at = first // GRANULE + tl.arange(0, BLOCK // GRANULE if BLOCK > GRANULE else 1)
    base = ranges + batch * 2 * granules + at
    start = tl.min(tl.load(base, mask=at < granules, other=2147483647), 0)
    return start, tl.max(tl.load(base + granules, mask=at < granules, other=0), 0)


@triton.jit
def keys_seen(ranges, batch, first, queries, keys, before, after, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(start, whole, end): a tile of queries sees no key before `start` or from `end` on, and all before `whole`."""
    start, whole, end = 0, keys // BLOCK_N * BLOCK_N, keys
    aligned = first + keys - queries  # the key in the position of the first query
    if after is not None:
        end = tl.maximum(tl.minimum(end, aligned + BLOCK_M + after), 0)
        whole = tl.maximum(tl.minimum(whole, (aligned + 1 + after) // BLOCK_N * BLOCK_N), 0)
    if before is not None:
        start = tl.maximum(aligned - before, 0) // BLOCK_N * BLOCK_N
        whole = start
    if ranges is not None:
        low, high = range_of_tile(ranges, batch, first, queries, BLOCK_M)
        start, end = tl.maximum(start, low // BLOCK_N * BLOCK_N), tl.minimum(end, high)
        whole = start
    return start, whole, end
