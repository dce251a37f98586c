"""Functions that the kernels of `flash.py` share, in the manner of FlashAttention-2 (Dao 2023).

A program works on one tile of queries and loops over the keys, or the reverse, so that no matrix of queries × keys
exists. Normalisers are log2 of the softmax's sums.

- `at_q`, `at_k`: positions of queries and keys, shaped to broadcast over a tile. A bias is read by its diagonal at_k −
  at_q, so a tile of M × N reads M + N − 1 neighbouring values.
- Labels: a query attends to the keys with an equal label.
- MASKED: 0 where all pairs of a tile are visible. Positions beyond the queries need no mask: their rows aren't stored,
  and with their normaliser of ∞ they give no gradient.
- `settings`: (queries, keys, before, after, scale, softcap). The lengths; the number of keys that a query attends to
  before its own position and after it, None: no limit; the factor of logits; their soft cap, None: off.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pretrain.models.kernels import GRANULE as _GRANULE

LOG2_E = tl.constexpr(1.4426950408889634)
GRANULE = tl.constexpr(_GRANULE)  # a tile's size is a multiple or a divisor of this
# Triton would compile a kernel again for sizes of 1 and for multiples of 16. Here sizes only decide which elements a
# tile leaves out, so nothing would be gained.
UNSPECIALIZED = {
    "do_not_specialize": ["diagonals_stride", "heads", "queries", "keys", "before", "after"],
    "do_not_specialize_on_alignment": ["DIAGONALS"],
}


class Tiles(NamedTuple):
    """Rows and columns of the logits that a program holds at a time, its warps, and its stages of prefetching."""

    rows: int
    columns: int
    warps: int
    stages: int


# Tiles in bf16, by the bytes of shared memory that a program may have, and by the widest head. No loop spills registers
# in the forms of attention that families use (docs/results/attention-on-gpus.md). For heads of 64 on an H100 they are
# the fastest measured (docs/results/gpu.md).
TILES = {
    101_376: {  # RTX 3090, 4090 and 5090, L40S
        "forward": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(64, 32, 8, 2)},
        "backward_queries": {64: Tiles(32, 32, 4, 2), 128: Tiles(64, 64, 8, 1), 256: Tiles(32, 32, 8, 2)},
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
_TILES_IN_FP32 = Tiles(32, 32, 4, 2)  # fp32 has no tensor cores


@cache
def shared_memory() -> int:
    """The bytes of shared memory that a program may have on this GPU; without a GPU, on an A100."""
    if not torch.cuda.is_available():
        return 166_912
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return device.shared_memory_per_block_optin  # type: ignore[attr-defined]  # PyTorch's stubs lack it


def tile_sizes(kernel: str, dtype: torch.dtype, d_kv: int, offered: int | None = None) -> Tiles:
    """The tiles of `kernel` for heads of width `d_kv`. `offered`: bytes of shared memory that a program may have; None:
    those of this GPU. If all tiles need more, Triton refuses them in one line."""
    if dtype == torch.float32:
        return _TILES_IN_FP32
    tiles = tiles_offered(offered)[kernel]
    return tiles[min(width for width in tiles if width >= d_kv)]


def tiles_offered(offered: int | None = None) -> dict[str, dict[int, Tiles]]:
    """The tiles of each kernel, by the widest head."""
    offered = offered or shared_memory()
    return TILES[max((needed for needed in TILES if needed <= offered), default=min(TILES))]


@triton.jit
def load_tile(base, at, stride, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows `at` of a head, (len(at), BLOCK_D); zeros outside."""
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
    """`base` moved by `distance` elements; None if `base` is None."""
    if base is None:
        return  # Triton 3.6 can't return the constant None
    else:
        return base + distance


@triton.jit
def load_labels(labels, at, length):
    """The labels at `at`; None if `labels` is None."""
    if labels is None:
        return
    else:
        return tl.load(labels + at, mask=at < length)


@triton.jit
def spread(numbers, at, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The `numbers` (any length) at the indices `at` (ROWS, COLUMNS), through shared memory.

    `tl.load` with an address for each number does the same, but Triton prefetches it by copies of 4 bytes, which
    doubled the time of the forward pass on an H200 (docs/results/gpu.md).
    """
    return tl.reshape(tl.gather(numbers, tl.reshape(at, [ROWS * COLUMNS]), 0), [ROWS, COLUMNS])


@triton.jit
def in_each_row(numbers, ROWS: tl.constexpr):
    """`numbers` as each row of (ROWS, len(numbers))."""
    COLUMNS: tl.constexpr = numbers.shape[0]
    return spread(numbers, tl.zeros((ROWS, 1), tl.int32) + tl.arange(0, COLUMNS)[None, :], ROWS, COLUMNS)


@triton.jit
def sums_of_diagonals(tile):
    """The sums of a square tile's diagonals, as two vectors (columns,). The first has the diagonals that end at the
    tile's last row, from 1 − columns on; the second those that continue in the next tile, from 1 on."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    row = tl.arange(0, ROWS)[:, None]
    turned = row + tl.arange(0, COLUMNS)[None, :] + 1  # each row turned by its number: diagonals become columns
    flat = tl.reshape(tile, [ROWS * COLUMNS])
    upright = spread(flat, row * COLUMNS + turned % COLUMNS, ROWS, COLUMNS)
    ended = tl.where(turned < COLUMNS, 0.0, upright)  # by one comparison for both
    continued = tl.where(turned < COLUMNS, upright, 0.0)
    return tl.reduce((ended, continued), 0, add_pairs)  # in one pass: half the barriers of two


@triton.jit
def add_pairs(one, other, of_one, of_other):
    return one + of_one, other + of_other


@triton.jit
def tile_of_logits(
    rows, columns, at_q, at_k, label_q, label_k, diagonals, lowest, settings,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The logits rows · columnsᵀ with the bias, −∞ at hidden pairs, and the slope of the soft cap. Rows are queries or
    keys. `lowest`: the diagonal of the tile's last query and first key."""
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
    """Maps uint32 to uint32 so that every bit of `x` changes every bit of the result: a low-bias bijection
    (Wellons)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def seed_of_head(SEED, row):
    """The seed of one head of one example; None: no dropout."""
    if SEED is None:
        return
    else:
        return mixed(tl.load(SEED).to(tl.uint32) + row.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def drop(weights, seed, at_q, at_k, dropout):
    """`weights` with the share `dropout` set to 0 and the others scaled up: a function of seed and position alone.

    Each query has a random number, so that a query and a key take `mixed` only once more.
    """
    if seed is not None:
        draws = mixed(mixed(at_q.to(tl.uint32) + seed) ^ (at_k.to(tl.uint32) * 0x9E3779B9))
        mask = draws >= tl.cast(dropout * 4294967296.0, tl.uint32)
        weights = tl.where(mask, weights * (1.0 / (1.0 - dropout)), 0.0)
    return weights


@triton.jit
def range_of_tile(ranges, batch, first, length, BLOCK: tl.constexpr):
    """The start and end of all keys (or queries) visible to the BLOCK positions from `first` on. `ranges`: (batch, 2,
    granules)."""
    granules = tl.cdiv(length, GRANULE)
    at = first // GRANULE + tl.arange(0, BLOCK // GRANULE if BLOCK > GRANULE else 1)
    base = ranges + batch * 2 * granules + at
    start = tl.min(tl.load(base, mask=at < granules, other=2147483647), 0)
    return start, tl.max(tl.load(base + granules, mask=at < granules, other=0), 0)


@triton.jit
def keys_seen(ranges, batch, first, queries, keys, before, after, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(start, whole, end): the queries of a tile attend to no key outside start … end, and to all keys from start to
    whole."""
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
