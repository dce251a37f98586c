"""Attention's gradients: of queries, then of keys and values, then of the diagonals of the bias.

Each kernel computes the weights again from the normalisers that the forward pass kept.
"""

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
    range_of_tile,
    seed_of_head,
    store_tile,
    tile_of_logits,
)


@triton.jit
def _accumulate_dq(
    dq, q, do, normaliser, delta, k_base, v_base, k_stride, v_stride, low, high, at_q, label_q, key_labels, diagonals,
    settings, seed, dropout, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    keys = settings[1]
    for first in tl.range(low, high, BLOCK_N):
        at_k = first + tl.arange(0, BLOCK_N)
        k = load_tile(k_base, at_k, k_stride, keys, D, BLOCK_D)
        v = load_tile(v_base, at_k, v_stride, keys, D, BLOCK_D)
        label_k = load_labels(key_labels, at_k[None, :], keys, OUTSIDE_KEYS)
        logits, slope = tile_of_logits(
            q, k, at_q, at_k[None, :], label_q, label_k, diagonals, settings, CAUSAL, MASKED, PRECISION
        )
        weights = tl.exp2(logits * LOG2_E - normaliser[:, None])
        grad_weights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        grad_weights = drop(grad_weights, seed, at_q, at_k[None, :], keys, dropout)
        grad_logits = weights * (grad_weights - delta[:, None]) * slope
        dq = tl.dot(grad_logits.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(**UNSPECIALIZED)
def backward_queries(
    Q, K, V, DIAGONALS, QUERY_LABELS, KEY_LABELS, RANGES, SEED, OUT, NORMALISERS, DO, GRAD_NORMALISERS, DQ, DELTA,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, db, dh, dl, gb, gh, gl, diagonals_stride,
    heads, queries, keys, before, after, scale, softcap, dropout,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries, and their deltas for the other kernels: sums of output · its gradient, less
    what the normalisers' gradient adds to the logits'."""
    first = tl.program_id(0) * BLOCK_M
    row = tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), row % heads
    at_q = first + tl.arange(0, BLOCK_M)
    q = load_tile(Q + batch * qb + head * qh, at_q, ql, queries, D, BLOCK_D)
    do = load_tile(DO + batch * db + head * dh, at_q, dl, queries, D, BLOCK_D)
    out = load_tile(OUT + batch * ob + head * oh, at_q, ol, queries, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    place = row.to(tl.int64) * queries + at_q
    if GRAD_NORMALISERS is not None:
        delta -= LOG2_E * tl.load(GRAD_NORMALISERS + place, mask=at_q < queries, other=0.0)
    tl.store(DELTA + place, delta, mask=at_q < queries)
    normaliser = tl.load(NORMALISERS + place, mask=at_q < queries, other=float("inf"))
    seed = seed_of_head(SEED, row)
    settings = queries, keys, before, after, scale, softcap
    diagonals = offset(DIAGONALS, head * diagonals_stride)
    label_q = load_labels(offset(QUERY_LABELS, batch * queries), at_q[:, None], queries, OUTSIDE_QUERIES)
    key_labels = offset(KEY_LABELS, batch * keys)
    start, whole, end = keys_seen(RANGES, batch, first, queries, keys, before, after, CAUSAL, BLOCK_M, BLOCK_N)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    k_base, v_base = K + batch * kb + head * kh, V + batch * vb + head * vh
    if RANGES is None and before is None:
        dq = _accumulate_dq(
            dq, q, do, normaliser, delta, k_base, v_base, kl, vl, start, whole, at_q[:, None], label_q, key_labels,
            diagonals, settings, seed, dropout, CAUSAL, False, PRECISION, BLOCK_N, D, BLOCK_D,
        )  # fmt: skip
    dq = _accumulate_dq(
        dq, q, do, normaliser, delta, k_base, v_base, kl, vl, whole, end, at_q[:, None], label_q, key_labels,
        diagonals, settings, seed, dropout, CAUSAL, True, PRECISION, BLOCK_N, D, BLOCK_D,
    )  # fmt: skip
    store_tile(DQ + batch * gb + head * gh, at_q, gl, queries, dq * scale, D, BLOCK_D)


@triton.jit
def _accumulate_dk_dv(
    dk, dv, k, v, q_base, do_base, q_stride, do_stride, normalisers, deltas, low, high, at_k, label_k, query_labels,
    diagonals, settings, seed, dropout, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    queries, keys = settings[0], settings[1]
    for first in tl.range(low, high, BLOCK_M):
        at_q = first + tl.arange(0, BLOCK_M)
        q = load_tile(q_base, at_q, q_stride, queries, D, BLOCK_D)
        do = load_tile(do_base, at_q, do_stride, queries, D, BLOCK_D)
        normaliser = tl.load(normalisers + at_q, mask=at_q < queries, other=float("inf"))
        delta = tl.load(deltas + at_q, mask=at_q < queries, other=0.0)
        label_q = load_labels(query_labels, at_q[None, :], queries, OUTSIDE_QUERIES)
        logits, slope = tile_of_logits(
            k, q, at_q[None, :], at_k, label_q, label_k, diagonals, settings, CAUSAL, MASKED, PRECISION
        )
        weights = tl.exp2(logits * LOG2_E - normaliser[None, :])
        dropped = drop(weights, seed, at_q[None, :], at_k, keys, dropout)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
        grad_weights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        grad_weights = drop(grad_weights, seed, at_q[None, :], at_k, keys, dropout)
        grad_logits = weights * (grad_weights - delta[None, :]) * slope
        dk = tl.dot(grad_logits.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(**UNSPECIALIZED)
def backward_keys(
    Q, K, V, DIAGONALS, QUERY_LABELS, KEY_LABELS, RANGES, SEED, NORMALISERS, DO, DELTA, DK, DV,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, db, dh, dl, gb, gh, gl, diagonals_stride,
    heads, queries, keys, before, after, scale, softcap, dropout,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values, whose strides are alike."""
    first = tl.program_id(0) * BLOCK_N
    row = tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), row % heads
    at_k = first + tl.arange(0, BLOCK_N)
    k = load_tile(K + batch * kb + head * kh, at_k, kl, keys, D, BLOCK_D)
    v = load_tile(V + batch * vb + head * vh, at_k, vl, keys, D, BLOCK_D)
    seed = seed_of_head(SEED, row)
    settings = queries, keys, before, after, scale, softcap
    diagonals = offset(DIAGONALS, head * diagonals_stride)
    label_k = load_labels(offset(KEY_LABELS, batch * keys), at_k[:, None], keys, OUTSIDE_KEYS)
    query_labels = offset(QUERY_LABELS, batch * queries)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    q_base, do_base = Q + batch * qb + head * qh, DO + batch * db + head * dh
    normalisers, deltas = NORMALISERS + row.to(tl.int64) * queries, DELTA + row.to(tl.int64) * queries
    start, whole, end = 0, 0, queries // BLOCK_M * BLOCK_M
    if before is not None:
        start = tl.maximum(first - (keys - queries) - after, 0) // BLOCK_M * BLOCK_M
        whole = tl.minimum(queries, tl.maximum(first + BLOCK_N - (keys - queries) + before, 0))
    elif CAUSAL:  # queries before `start` see none of the keys, those from `whole` on see all
        start = tl.maximum(first - (keys - queries), 0) // BLOCK_M * BLOCK_M
        whole = tl.maximum(tl.cdiv(first + BLOCK_N - 1 - (keys - queries), BLOCK_M) * BLOCK_M, start)
        end = tl.maximum(end, whole)
    if RANGES is not None:
        low, high = range_of_tile(RANGES, batch, first, keys, BLOCK_N)
        start = tl.maximum(start, low // BLOCK_M * BLOCK_M)
        whole = high if before is None else tl.minimum(whole, high)
    if CAUSAL or before is not None or RANGES is not None:
        dk, dv = _accumulate_dk_dv(
            dk, dv, k, v, q_base, do_base, ql, dl, normalisers, deltas, start, tl.minimum(whole, queries),
            at_k[:, None], label_k, query_labels, diagonals, settings, seed, dropout, CAUSAL, True, PRECISION,
            BLOCK_M, D, BLOCK_D,
        )  # fmt: skip
    if RANGES is None and before is None:
        dk, dv = _accumulate_dk_dv(
            dk, dv, k, v, q_base, do_base, ql, dl, normalisers, deltas, whole, end,
            at_k[:, None], label_k, query_labels, diagonals, settings, seed, dropout, CAUSAL, False, PRECISION,
            BLOCK_M, D, BLOCK_D,
        )  # fmt: skip
        dk, dv = _accumulate_dk_dv(
            dk, dv, k, v, q_base, do_base, ql, dl, normalisers, deltas, end, queries,
            at_k[:, None], label_k, query_labels, diagonals, settings, seed, dropout, CAUSAL, True, PRECISION,
            BLOCK_M, D, BLOCK_D,
        )  # fmt: skip
    store_tile(DK + batch * gb + head * gh, at_k, gl, keys, dk * scale, D, BLOCK_D)
    store_tile(DV + batch * gb + head * gh, at_k, gl, keys, dv, D, BLOCK_D)


@triton.jit(**UNSPECIALIZED)
def backward_diagonals(
    Q, K, V, DIAGONALS, QUERY_LABELS, KEY_LABELS, RANGES, SEED, NORMALISERS, DO, DELTA, PARTS,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, db, dh, dl, diagonals_stride, batches, heads, queries, keys,
    before, after, scale, softcap, dropout, splits,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A share of the bias's gradient: PARTS (heads, diagonals of tiles, splits, 2 · BLOCK).

    All tiles on one diagonal of tiles hold the same diagonals of scores. A program adds up its share
    of these tiles, over queries and batch, and reduces the sum by diagonals once: entry t belongs to the diagonal
    t − BLOCK + 1 of the tile.
    """
    number, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles_q, tiles_k = tl.cdiv(queries, BLOCK), tl.cdiv(keys, BLOCK)
    ahead = number - (tiles_q - 1)  # by how many tiles the keys are ahead of the queries
    first_tile = tl.maximum(-ahead, 0)
    tiles = tl.minimum(tiles_q, tiles_k - ahead) - first_tile
    visits = tiles * batches
    if before is not None:
        distance = ahead * BLOCK - (keys - queries)  # of the first key from the first query of each tile
        visits = tl.where((distance - BLOCK >= after) | (distance + BLOCK <= -before), 0, visits)
    elif CAUSAL:
        visits = tl.where(ahead * BLOCK > BLOCK - 1 + keys - queries, 0, visits)
    share = tl.cdiv(visits, splits)
    diagonals = offset(DIAGONALS, head * diagonals_stride)
    settings = queries, keys, before, after, scale, softcap
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for visit in tl.range(split * share, tl.minimum((split + 1) * share, visits)):
        batch = (visit // tiles).to(tl.int64)
        first_q = (first_tile + visit % tiles) * BLOCK
        first_k = first_q + ahead * BLOCK
        near = True
        if RANGES is not None:
            low, high = range_of_tile(RANGES, batch, first_q, queries, BLOCK)
            near = (first_k + BLOCK > low) & (first_k < high)
        if near:
            at_q, at_k = first_q + tl.arange(0, BLOCK), first_k + tl.arange(0, BLOCK)
            q = load_tile(Q + batch * qb + head * qh, at_q, ql, queries, D, BLOCK_D)
            k = load_tile(K + batch * kb + head * kh, at_k, kl, keys, D, BLOCK_D)
            v = load_tile(V + batch * vb + head * vh, at_k, vl, keys, D, BLOCK_D)
            do = load_tile(DO + batch * db + head * dh, at_q, dl, queries, D, BLOCK_D)
            row = (batch * heads + head) * queries
            normaliser = tl.load(NORMALISERS + row + at_q, mask=at_q < queries, other=float("inf"))
            delta = tl.load(DELTA + row + at_q, mask=at_q < queries, other=0.0)
            label_q = load_labels(offset(QUERY_LABELS, batch * queries), at_q[:, None], queries, OUTSIDE_QUERIES)
            label_k = load_labels(offset(KEY_LABELS, batch * keys), at_k[None, :], keys, OUTSIDE_KEYS)
            seed = seed_of_head(SEED, batch * heads + head)
            logits, _slope = tile_of_logits(
                q, k, at_q[:, None], at_k[None, :], label_q, label_k, diagonals, settings, CAUSAL, True, PRECISION
            )
            weights = tl.exp2(logits * LOG2_E - normaliser[:, None])
            grad_weights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            grad_weights = drop(grad_weights, seed, at_q[:, None], at_k[None, :], keys, dropout)
            total += weights * (grad_weights - delta[:, None])
    i, t = tl.arange(0, BLOCK)[:, None], tl.arange(0, 2 * BLOCK)[None, :]
    column = t - (BLOCK - 1) + i
    skewed = tl.gather(total, tl.minimum(tl.maximum(column, 0), BLOCK - 1), 1)
    sums = tl.sum(tl.where((column >= 0) & (column < BLOCK), skewed, 0.0), 0)
    address = ((head * (tiles_q + tiles_k - 1) + number) * splits + split) * 2 * BLOCK
    tl.store(PARTS + address + tl.arange(0, 2 * BLOCK), sums)
