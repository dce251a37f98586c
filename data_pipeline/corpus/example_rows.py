"""Rows that hold several examples, which segment numbers separate: which example goes into which row, and the rows."""

import numpy as np

from data_pipeline.corpus.objectives.objective import Examples, Padded

_OPEN = 512  # rows that may still take an example
_MULTIPLE = 64


def balanced(one_each: Examples, per_row: int) -> Examples:
    """The same examples, on average `per_row` of them in each row, in rows of about the same length.

    The longest comes first, each into the row where it widens inputs and targets together the least; among equals, into
    the row with the fewest tokens so far (Graham 1969). The widths are multiples of 64, so that batches come in few
    shapes. Rows that hold several examples already stay as they are.
    """
    if one_each.input_segments is not None:
        return one_each
    sizes = np.stack([one_each.inputs.lengths, one_each.targets.lengths], axis=1)
    row, segment = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
    tokens = np.zeros((-(-len(sizes) // per_row), 2), dtype=np.int64)
    counts = np.zeros(len(tokens), dtype=np.int64)
    for example in np.argsort(-sizes.sum(axis=1), kind="stable"):
        widths = np.maximum(tokens + sizes[example], tokens.max(axis=0)).sum(axis=1)
        slot = int(np.lexsort((tokens.sum(axis=1), widths))[0])
        tokens[slot] += sizes[example]
        counts[slot] += 1
        row[example], segment[example] = slot, counts[slot]
    inputs, targets = (width_of(int(most)) for most in tokens.max(axis=0))
    return in_rows(one_each, row, segment, len(tokens), (inputs, targets))


def width_of(tokens: int) -> int:
    """The width of a batch of balanced rows whose longest row has this many tokens."""
    return max(1, -(-tokens // _MULTIPLE)) * _MULTIPLE


def in_rows(one_each: Examples, row: np.ndarray, segment: np.ndarray, count: int, widths: tuple[int, int]) -> Examples:
    """The examples in `count` rows: each in its `row` (n,), in the order of `segment` (n,)."""
    inputs, input_segments = _side(one_each.inputs, row, segment, count, widths[0])
    targets, target_segments = _side(one_each.targets, row, segment, count, widths[1])
    along = {}
    sides = {"prefix_mask": one_each.inputs, "predicted": one_each.targets}
    for name, like in sides.items():
        width = widths[like is one_each.targets]
        if (values := one_each.optional.get(name)) is not None:
            along[name] = _side(Padded(values, like.lengths), row, segment, count, width)[0].values
    return Examples(inputs, targets, input_segments=input_segments, target_segments=target_segments, **along)


def best_fit(sizes: np.ndarray, room: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(row (n,), segment (n,) from 1) of examples with `sizes` (n, 2), in tokens of inputs and of targets.

    Sizes [[3, 1], [4, 1], [2, 1]] in rows of (5, 5)  ->  rows [0, 1, 0], segments [1, 1, 2]
    """
    left = np.zeros((_OPEN, 2), dtype=np.int64)
    number = np.full(_OPEN, -1)
    counts = np.zeros(_OPEN, dtype=np.int64)
    rows, segments = np.zeros(len(sizes), dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
    opened = 0
    for example, size in enumerate(sizes):
        after = left - size
        fits = (after >= 0).all(axis=1)
        if fits.any():
            slot = int(np.where(fits, after.sum(axis=1), np.iinfo(np.int64).max).argmin())
        else:
            slot = int(left.sum(axis=1).argmin())  # the fullest row, or an unused slot
            left[slot], number[slot], counts[slot] = room, opened, 0
            opened += 1
        left[slot] -= size
        counts[slot] += 1
        rows[example], segments[example] = number[slot], counts[slot]
    return rows, segments


def _side(examples: Padded, row: np.ndarray, segment: np.ndarray, count: int, width: int) -> tuple[Padded, np.ndarray]:
    """(`count` rows of at most `width` tokens, the segment of each token) of examples concatenated in their rows."""
    order = np.lexsort((segment, row))
    lengths = np.zeros(count, dtype=np.int64)
    np.add.at(lengths, row, examples.lengths)
    out = Padded(np.zeros((count, width), dtype=examples.values.dtype), lengths)
    ordered = Padded(examples.values[order], examples.lengths[order])
    out.values[out.filled] = ordered.values[ordered.filled]
    segments = np.zeros((count, width), dtype=np.min_scalar_type(width))  # a row holds at most an example per token
    segments[out.filled] = np.repeat(segment[order], ordered.lengths)
    return out, segments
