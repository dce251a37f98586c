"""The attention kernels: the forward pass, the gradients of queries and bias, and the gradients of keys and values.

Both gradient kernels recompute the attention weights from the normalisers that the forward pass kept.
"""

import triton
import triton.language as tl

from pretrain.models.kernels.tiles import (
    LOG2_E,
    UNSPECIALIZED,
    drop,
    in_each_row,
    keys_seen,
    load_labels,
    load_tile,
    offset,
    range_of_tile,
    seed_of_head,
    store_tile,
    sums_of_diagonals,
    tile_of_logits,
)


@triton.jit(**UNSPECIALIZED)
def forward(
    Q, K, V, DIAGONALS, QUERY_LABELS, KEY_LABELS, RANGES, SEED, OUT, NORMALISERS,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, diagonals_stride, heads, queries, keys,
    before, after, scale, softcap, dropout, PRECISION: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Outputs and log2 of the softmax's normalisers, for one tile of queries; 0 and ∞ for a query that attends to no
    key."""
    first = tl.program_id(0) * BLOCK_M
    row = tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), row % heads
    at_q = first + tl.arange(0, BLOCK_M)
    q = load_tile(Q + batch * qb + head * qh, at_q, ql, queries, D, BLOCK_D)
    seed = seed_of_head(SEED, row)
    settings = queries, keys, before, after, scale, softcap
    diagonals = offset(DIAGONALS, head * diagonals_stride)
    label_q = load_labels(offset(QUERY_LABELS, batch * queries), at_q[:, None], queries)
    key_labels = offset(KEY_LABELS, batch * keys)
    start, whole, end = keys_seen(RANGES, batch, first, queries, keys, before, after, BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    for masked in tl.static_range(2):
        if masked == 1 or (RANGES is None and before is None):
            for first_k in tl.range(whole if masked else start, end if masked else whole, BLOCK_N):
                at_k = first_k + tl.arange(0, BLOCK_N)
                k = load_tile(K + batch * kb + head * kh, at_k, kl, keys, D, BLOCK_D)
                label_k = load_labels(key_labels, at_k[None, :], keys)
                logits, _slope = tile_of_logits(
                    q, k, at_q[:, None], at_k[None, :], label_q, label_k,
                    diagonals, first_k - first - BLOCK_M + 1, settings, masked, PRECISION,
                )  # fmt: skip
                higher = tl.maximum(top, tl.max(logits, 1))
                shift = tl.where(higher == float("-inf"), 0.0, higher) if masked else higher
                weights = tl.exp2(logits * LOG2_E - (shift * LOG2_E)[:, None])
                shrink = tl.exp2((top - shift) * LOG2_E)
                weight = weight * shrink + tl.sum(weights, 1)
                v = load_tile(V + batch * vb + head * vh, at_k, vl, keys, D, BLOCK_D)
                weights = drop(weights, seed, at_q[:, None], at_k[None, :], dropout)
                total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
                top = higher
    total = total / tl.where(weight > 0, weight, 1.0)[:, None]
    normaliser = tl.where(weight > 0, top * LOG2_E + tl.log2(tl.where(weight > 0, weight, 1.0)), float("inf"))
    store_tile(OUT + batch * ob + head * oh, at_q, ol, queries, total, D, BLOCK_D)
    tl.store(NORMALISERS + row.to(tl.int64) * queries + at_q, normaliser, mask=at_q < queries)


@triton.jit(**UNSPECIALIZED)
def backward_queries(
    Q, K, V, DIAGONALS, QUERY_LABELS, KEY_LABELS, RANGES, SEED, OUT, NORMALISERS, DO, DQ, DELTA, PARTS,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, db, dh, dl, gb, gh, gl, diagonals_stride,
    heads, queries, keys, before, after, scale, softcap, dropout,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries, and the queries' deltas for the other kernel: sums of output · gradient.

    PARTS (batch, heads, tiles of queries, (tiles of keys + 1) · BLOCK_N) gets the tile's share of the bias's gradient:
    the sum of each diagonal. The diagonal through the tile's first query and key stands at BLOCK_N − 1. None: no bias.
    """
    first = tl.program_id(0) * BLOCK_M
    row = tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), row % heads
    at_q = first + tl.arange(0, BLOCK_M)
    q = load_tile(Q + batch * qb + head * qh, at_q, ql, queries, D, BLOCK_D)
    do = load_tile(DO + batch * db + head * dh, at_q, dl, queries, D, BLOCK_D)
    out = load_tile(OUT + batch * ob + head * oh, at_q, ol, queries, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    place = row.to(tl.int64) * queries + at_q
    tl.store(DELTA + place, delta, mask=at_q < queries)
    normaliser = tl.load(NORMALISERS + place, mask=at_q < queries, other=float("inf"))
    seed = seed_of_head(SEED, row)
    settings = queries, keys, before, after, scale, softcap
    diagonals = offset(DIAGONALS, head * diagonals_stride)
    label_q = load_labels(offset(QUERY_LABELS, batch * queries), at_q[:, None], queries)
    key_labels = offset(KEY_LABELS, batch * keys)
    start, whole, end = keys_seen(RANGES, batch, first, queries, keys, before, after, BLOCK_M, BLOCK_N)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    carried = tl.zeros((BLOCK_N,), tl.float32)
    tile = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    parts = offset(PARTS, tile * (tl.cdiv(keys, BLOCK_N) + 1) * BLOCK_N + tl.arange(0, BLOCK_N))
    for masked in tl.static_range(2):
        if masked == 1 or (RANGES is None and before is None):
            for first_k in tl.range(whole if masked else start, end if masked else whole, BLOCK_N):
                at_k = first_k + tl.arange(0, BLOCK_N)
                k = load_tile(K + batch * kb + head * kh, at_k, kl, keys, D, BLOCK_D)
                v = load_tile(V + batch * vb + head * vh, at_k, vl, keys, D, BLOCK_D)
                label_k = load_labels(key_labels, at_k[None, :], keys)
                logits, slope = tile_of_logits(
                    q, k, at_q[:, None], at_k[None, :], label_q, label_k,
                    diagonals, first_k - first - BLOCK_M + 1, settings, masked, PRECISION,
                )  # fmt: skip
                weights = tl.exp2(logits * LOG2_E - normaliser[:, None])
                grad_weights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                grad_weights = drop(grad_weights, seed, at_q[:, None], at_k[None, :], dropout)
                grad_logits = weights * (grad_weights - delta[:, None])
                if PARTS is not None:
                    ended, continued = sums_of_diagonals(grad_logits)
                    tl.store(parts + first_k, carried + ended)
                    carried = continued
                dq = tl.dot((grad_logits * slope).to(k.dtype), k, dq, input_precision=PRECISION)
    if PARTS is not None:
        last = start + tl.cdiv(tl.maximum(end - start, 0), BLOCK_N) * BLOCK_N
        tl.store(parts + tl.minimum(last, tl.cdiv(keys, BLOCK_N) * BLOCK_N), carried)
    store_tile(DQ + batch * gb + head * gh, at_q, gl, queries, dq * scale, D, BLOCK_D)


@triton.jit(**UNSPECIALIZED)
def backward_keys(
    Q, K, V, DIAGONALS, QUERY_LABELS, KEY_LABELS, RANGES, SEED, NORMALISERS, DO, DELTA, DK, DV,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, db, dh, dl, gb, gh, gl, diagonals_stride,
    heads, queries, keys, before, after, scale, softcap, dropout,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values; both gradients have the same strides."""
    first = tl.program_id(0) * BLOCK_N
    row = tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), row % heads
    at_k = first + tl.arange(0, BLOCK_N)
    k = load_tile(K + batch * kb + head * kh, at_k, kl, keys, D, BLOCK_D)
    v = load_tile(V + batch * vb + head * vh, at_k, vl, keys, D, BLOCK_D)
    seed = seed_of_head(SEED, row)
    settings = queries, keys, before, after, scale, softcap
    diagonals = offset(DIAGONALS, head * diagonals_stride)
    label_k = load_labels(offset(KEY_LABELS, batch * keys), at_k[:, None], keys)
    query_labels = offset(QUERY_LABELS, batch * queries)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    normalisers, deltas = NORMALISERS + row.to(tl.int64) * queries, DELTA + row.to(tl.int64) * queries
    start, whole = 0, 0  # queries before `start` attend to none of the keys, queries from `whole` on to all
    aligned = first - (keys - queries)  # the query in the position of the first key
    if after is not None:
        start = tl.maximum(aligned - after, 0) // BLOCK_M * BLOCK_M
        whole = tl.maximum(tl.cdiv(aligned + BLOCK_N - 1 - after, BLOCK_M) * BLOCK_M, start)
    if before is not None:
        whole = tl.minimum(queries, tl.maximum(aligned + BLOCK_N + before, 0))
    if RANGES is not None:
        low, high = range_of_tile(RANGES, batch, first, keys, BLOCK_N)
        start = tl.maximum(start, low // BLOCK_M * BLOCK_M)
        whole = high if before is None else tl.minimum(whole, high)
    for rest in tl.static_range(2):
        if (
            (RANGES is None and before is None)
            if rest
            else (after is not None or before is not None or RANGES is not None)
        ):
            for first_q in tl.range(whole if rest else start, queries if rest else tl.minimum(whole, queries), BLOCK_M):
                at_q = first_q + tl.arange(0, BLOCK_M)
                q = load_tile(Q + batch * qb + head * qh, at_q, ql, queries, D, BLOCK_D)
                do = load_tile(DO + batch * db + head * dh, at_q, dl, queries, D, BLOCK_D)
                normaliser = tl.load(normalisers + at_q, mask=at_q < queries, other=float("inf"))
                delta = tl.load(deltas + at_q, mask=at_q < queries, other=0.0)
                label_q = load_labels(query_labels, at_q[None, :], queries)
                logits, slope = tile_of_logits(
                    k, q, at_q[None, :], at_k[:, None], label_q, label_k,
                    diagonals, first - first_q - BLOCK_M + 1, settings, rest == 0, PRECISION,
                )  # fmt: skip
                weights = tl.exp2(logits * LOG2_E - in_each_row(normaliser, BLOCK_N))
                dropped = drop(weights, seed, at_q[None, :], at_k[:, None], dropout)
                dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
                grad_weights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                grad_weights = drop(grad_weights, seed, at_q[None, :], at_k[:, None], dropout)
                grad_logits = weights * (grad_weights - in_each_row(delta, BLOCK_N)) * slope
                dk = tl.dot(grad_logits.to(q.dtype), q, dk, input_precision=PRECISION)
    store_tile(DK + batch * gb + head * gh, at_k, gl, keys, dk * scale, D, BLOCK_D)
    store_tile(DV + batch * gb + head * gh, at_k, gl, keys, dv, D, BLOCK_D)
