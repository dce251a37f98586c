"""Attention's forward pass: a program for each tile of queries."""

import triton
import triton.language as tl

from pretrain.kernels.tiles import (
    LOG2_E,
    OUTSIDE_KEYS,
    OUTSIDE_QUERIES,
    UNSPECIALIZED,
    drop,
    keys_seen,
    load_labels,
    load_tile,
    offset,
    seed_of_head,
    store_tile,
    tile_of_logits,
)


@triton.jit
def _attend(
    total, top, weight, q, k_base, v_base, k_stride, v_stride, low, high, at_q, label_q, key_labels, diagonals,
    settings, seed, dropout, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys `low` to `high`: unnormalised values, greatest logits and sums of weights."""
    keys = settings[1]
    for first in tl.range(low, high, BLOCK_N):
        at_k = first + tl.arange(0, BLOCK_N)
        k = load_tile(k_base, at_k, k_stride, keys, D, BLOCK_D)
        label_k = load_labels(key_labels, at_k[None, :], keys, OUTSIDE_KEYS)
        logits, _slope = tile_of_logits(
            q, k, at_q, at_k[None, :], label_q, label_k, diagonals, settings, CAUSAL, MASKED, PRECISION
        )
        higher = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(logits * LOG2_E - (shift * LOG2_E)[:, None])
        shrink = tl.exp2((top - shift) * LOG2_E)
        weight = weight * shrink + tl.sum(weights, 1)
        v = load_tile(v_base, at_k, v_stride, keys, D, BLOCK_D)
        weights = drop(weights, seed, at_q, at_k[None, :], keys, dropout)
        total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    return total, top, weight


@triton.jit(**UNSPECIALIZED)
def forward(
    Q, K, V, DIAGONALS, QUERY_LABELS, KEY_LABELS, RANGES, SEED, OUT, NORMALISERS,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, diagonals_stride, heads, queries, keys,
    before, after, scale, softcap, dropout, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Outputs and log2 of the softmax's normalisers, for one tile of queries. A query that sees nothing gives 0, ∞."""
    first = tl.program_id(0) * BLOCK_M
    row = tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), row % heads
    at_q = first + tl.arange(0, BLOCK_M)
    q = load_tile(Q + batch * qb + head * qh, at_q, ql, queries, D, BLOCK_D)
    seed = seed_of_head(SEED, row)
    settings = queries, keys, before, after, scale, softcap
    diagonals = offset(DIAGONALS, head * diagonals_stride)
    label_q = load_labels(offset(QUERY_LABELS, batch * queries), at_q[:, None], queries, OUTSIDE_QUERIES)
    key_labels = offset(KEY_LABELS, batch * keys)
    start, whole, end = keys_seen(RANGES, batch, first, queries, keys, before, after, CAUSAL, BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    k_base, v_base = K + batch * kb + head * kh, V + batch * vb + head * vh
    if RANGES is None and before is None:
        total, top, weight = _attend(
            total, top, weight, q, k_base, v_base, kl, vl, start, whole, at_q[:, None], label_q, key_labels, diagonals,
            settings, seed, dropout, CAUSAL, False, PRECISION, BLOCK_N, D, BLOCK_D,
        )  # fmt: skip
    total, top, weight = _attend(
        total, top, weight, q, k_base, v_base, kl, vl, whole, end, at_q[:, None], label_q, key_labels, diagonals,
        settings, seed, dropout, CAUSAL, True, PRECISION, BLOCK_N, D, BLOCK_D,
    )  # fmt: skip
    total = total / tl.where(weight > 0, weight, 1.0)[:, None]
    normaliser = tl.where(weight > 0, top * LOG2_E + tl.log2(tl.where(weight > 0, weight, 1.0)), float("inf"))
    store_tile(OUT + batch * ob + head * oh, at_q, ol, queries, total, D, BLOCK_D)
    tl.store(NORMALISERS + row.to(tl.int64) * queries + at_q, normaliser, mask=at_q < queries)
