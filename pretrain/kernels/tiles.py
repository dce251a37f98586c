"""What the kernels of `pretrain.kernels.attention` share. They work in the manner of FlashAttention-2 (Dao 2023).

A program works on one tile of queries or keys and loops over the other side, so that no matrix of queries × keys
exists. Normalisers are log2 of the softmax's sums.

Index names: `at_q` and `at_k` are positions of queries and keys, already shaped to broadcast over a tile. A bias is
read by its diagonal at_k − at_q, so a tile of M × N touches M + N − 1 neighbouring values, which the first-level cache
holds. Queries and keys see each other if their labels are equal (`pretrain.kernels.labels`); `MASKED` is off where a
tile is known to be visible as a whole.
"""

import triton
import triton.language as tl

from pretrain.kernels import labels

LOG2_E = tl.constexpr(1.4426950408889634)
OUTSIDE_QUERIES = tl.constexpr(-2)  # no key has this label
OUTSIDE_KEYS = tl.constexpr(-1)  # no query has this label
GRANULE = tl.constexpr(labels.GRANULE)  # tiles are multiples or divisors of it
# Triton would compile a kernel anew for sizes that are 1 or multiples of 16, which lengths are at random. Here they
# only decide which elements a tile leaves out, for which it makes no difference.
UNSPECIALIZED = {
    "do_not_specialize": ["diagonals_stride", "batches", "heads", "queries", "keys", "splits"],
    "do_not_specialize_on_alignment": ["DIAGONALS"],
}


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
    moved = None
    if base is not None:
        moved = base + distance
    return moved


@triton.jit
def load_labels(labels, at, length, OUTSIDE: tl.constexpr):
    """Labels in the shape of `at`, OUTSIDE beyond `length`; None if there are none."""
    found = None
    if labels is not None:
        found = tl.load(labels + at, mask=at < length, other=OUTSIDE)
    return found


@triton.jit
def tile_of_logits(
    rows, columns, at_q, at_k, label_q, label_k, diagonals, queries, keys, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows · columnsᵀ with the bias, −∞ at hidden pairs. Rows may be queries or keys."""
    logits = tl.dot(rows, tl.trans(columns), input_precision=PRECISION) * scale
    if diagonals is not None:
        logits += tl.load(diagonals + (at_k - at_q))
    if MASKED:
        seen = (at_k < keys) & (at_q < queries)
        if CAUSAL:
            seen = seen & (at_k <= at_q + keys - queries)
        if label_q is not None:
            seen = seen & (label_q == label_k)
        logits = tl.where(seen, logits, float("-inf"))
    return logits


@triton.jit
def mixed(x):
    """uint32 to uint32, every bit of the result depending on every bit of `x`; a bijection of low bias (Wellons)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def seed_of_head(SEED, row):
    """The seed of one head of one row of the batch; None without dropout."""
    seed = None
    if SEED is not None:
        seed = mixed(tl.load(SEED).to(tl.uint32) + row.to(tl.uint32) * 0x9E3779B9)
    return seed


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
    if BLOCK > GRANULE:
        at = first // GRANULE + tl.arange(0, BLOCK // GRANULE)
        base = ranges + batch * 2 * granules + at
        start = tl.min(tl.load(base, mask=at < granules, other=2147483647), 0)
        end = tl.max(tl.load(base + granules, mask=at < granules, other=0), 0)
    else:
        base = ranges + batch * 2 * granules + first // GRANULE
        start, end = tl.load(base), tl.load(base + granules)
    return start, end


@triton.jit
def keys_seen(ranges, batch, first, queries, keys, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(start, whole, end): a tile of queries sees no key before `start` or from `end` on, and all before `whole`."""
    start, whole, end = 0, keys // BLOCK_N * BLOCK_N, keys
    if CAUSAL:
        end = tl.maximum(tl.minimum(end, first + BLOCK_M + keys - queries), 0)
        whole = tl.maximum(tl.minimum(whole, (first + 1 + keys - queries) // BLOCK_N * BLOCK_N), 0)
    if ranges is not None:
        low, high = range_of_tile(ranges, batch, first, queries, BLOCK_M)
        start, end = low // BLOCK_N * BLOCK_N, tl.minimum(end, high)
        whole = start
    return start, whole, end
