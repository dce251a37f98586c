"""What the kernels of `pretrain.kernels.attention` share. They work in the manner of FlashAttention-2 (Dao 2023).

A program works on one tile of queries or keys and loops over the other side, so that no matrix of queries × keys
exists. Normalisers are log2 of the softmax's sums.

Index names: `at_q` and `at_k` are positions of queries and keys, already shaped to broadcast over a tile. A bias is
read by its diagonal at_k − at_q, so a tile of M × N touches M + N − 1 neighbouring values, which the first-level cache
holds. Queries and keys see each other if their labels are equal (`pretrain.kernels.labels`); `MASKED` is off where a
tile is known to be visible as a whole.

`settings` are (queries, keys, before, after, scale, softcap): the lengths; how many keys a query sees before its own
position and after it, None without a window; the factor of logits; and their soft cap, None without.
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
    "do_not_specialize": ["diagonals_stride", "batches", "heads", "queries", "keys", "splits", "before", "after"],
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
    rows, columns, at_q, at_k, label_q, label_k, diagonals, settings,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(rows · columnsᵀ with the bias, −∞ at hidden pairs; the slope of the soft cap). Rows may be queries or keys."""
    queries, keys, before, after, scale, softcap = settings
    logits = tl.dot(rows, tl.trans(columns), input_precision=PRECISION) * scale
    slope = 1.0
    if softcap is not None:
        share = 1 - 2 / (1 + tl.exp2(logits * (2 * LOG2_E / softcap)))  # tanh(logits / softcap)
        logits, slope = softcap * share, 1 - share * share
    if diagonals is not None:
        logits += tl.load(diagonals + (at_k - at_q))
    if MASKED:
        seen = (at_k < keys) & (at_q < queries)
        if before is not None:
            distance = at_k - at_q - (keys - queries)
            seen = seen & (distance >= -before) & (distance <= after)
        elif CAUSAL:
            seen = seen & (at_k <= at_q + keys - queries)
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
def keys_seen(
    ranges, batch, first, queries, keys, before, after, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(start, whole, end): a tile of queries sees no key before `start` or from `end` on, and all before `whole`."""
    start, whole, end = 0, keys // BLOCK_N * BLOCK_N, keys
    if before is not None:
        start = tl.maximum(first + keys - queries - before, 0) // BLOCK_N * BLOCK_N
        end = tl.maximum(tl.minimum(end, first + BLOCK_M + keys - queries + after), 0)
        whole = start
    elif CAUSAL:
        end = tl.maximum(tl.minimum(end, first + BLOCK_M + keys - queries), 0)
        whole = tl.maximum(tl.minimum(whole, (first + 1 + keys - queries) // BLOCK_N * BLOCK_N), 0)
    if ranges is not None:
        low, high = range_of_tile(ranges, batch, first, queries, BLOCK_M)
        start, end = tl.maximum(start, low // BLOCK_N * BLOCK_N), tl.minimum(end, high)
        whole = start
    return start, whole, end


# Triton's key of a kernel has the constants of a function that it calls only if that function's own key was asked for
# before. Asked for here, keys are the same in every process, whichever kernel it compiles first.
for _function in (load_tile, store_tile, load_labels, tile_of_logits, seed_of_head, drop, range_of_tile, keys_seen):
    _ = getattr(_function, "cache_key", None)  # functions of Triton's interpreter have none
