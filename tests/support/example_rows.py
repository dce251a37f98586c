"""Rows of random tokens, and checks that hold for every objective."""

from itertools import zip_longest

import numpy as np

from data_pipeline.corpus.objectives.objective import Examples, Objective, Padded
from data_pipeline.corpus.objectives.randomness import row_keys
from data_pipeline.text.vocabulary import Vocabulary

PAD, EOS, UNK, FIRST_SENTINEL, TEXT = 0, 1, 2, 33_099, (10, 32_000)
MODES = {"[R]": 3, "[S]": 4, "[X]": 5}
VOCABULARY = Vocabulary(33_100, TEXT, PAD, EOS, UNK, first_sentinel=FIRST_SENTINEL, sentinels=1000, special=MODES)


def make_rows(count: int, length: int, seed: int = 0) -> tuple[Padded, np.ndarray]:
    """`count` rows of `length` random tokens, and their keys."""
    values = np.random.default_rng(seed).integers(*TEXT, (count, length)).astype(np.uint16)
    return Padded.full(values), row_keys(seed, "test", 0, np.arange(count))


def ragged_rows(lengths: list[int], seed: int = 0) -> tuple[Padded, np.ndarray]:
    """Rows of these `lengths`, and their keys. The padding is a text token, so that code which reads it gets caught."""
    rows, keys = make_rows(len(lengths), max(lengths), seed)
    rows = Padded(rows.values, np.array(lengths, dtype=np.int64))
    rows.values[~rows.filled] = TEXT[0]
    return rows, keys


def as_lists(side: Padded) -> list[list[int]]:
    """The rows without their padding."""
    return [row[:length].tolist() for row, length in zip(side.values, side.lengths, strict=True)]


def restored(examples: Examples) -> list[list[int]]:
    """The original rows, restored from inputs and targets whose runs alternate."""
    rows = []
    for inputs, targets in zip(as_lists(examples.inputs), as_lists(examples.targets), strict=True):
        assert inputs[-1] == targets[-1] == EOS
        kept, masked = _runs(inputs[:-1]), _runs(targets[:-1])
        assert not (kept[0] and masked[0])  # one side has the row's first token, the other a sentinel for it
        first, second = (masked, kept[1:]) if masked[0] else (kept, masked[1:])
        row: list[int] = []
        for pair in zip_longest(first, second, fillvalue=[]):
            row += [*pair[0], *pair[1]]
        rows.append(row)
    return rows


def _runs(side: list[int]) -> list[list[int]]:
    """The tokens before, between and after the sentinels, which must be numbered 0, 1, 2, …"""
    runs: list[list[int]] = [[]]
    for token in side:
        if token >= TEXT[1]:
            assert token == FIRST_SENTINEL + 1 - len(runs)
            runs.append([])
        else:
            runs[-1].append(token)
    return runs


def assert_alike(one: Examples, other: Examples) -> None:
    """Asserts that both are equal in every field and dtype."""
    for name in ("inputs", "targets"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.values.dtype == b.values.dtype
        assert as_lists(a) == as_lists(b)
    assert one.optional.keys() == other.optional.keys()
    for name, array in one.optional.items():
        side = one.targets if name in ("predicted", "target_segments") else one.inputs
        assert array.shape == side.values.shape[: array.ndim]
        width = min(array.shape[-1], other.optional[name].shape[-1])
        assert (array[..., :width] == other.optional[name][..., :width]).all()
        assert not array[..., width:].any()
        assert not other.optional[name][..., width:].any()


def assert_rows_stand_alone(
    objective: Objective,
    rows: Padded,
    keys: np.ndarray,
    vocabulary: Vocabulary = VOCABULARY,
    columns: dict[str, np.ndarray] | None = None,
) -> Examples:
    """Asserts that a row's example is the same alone, in another order and beside longer rows.

    Padding must hold only the pad token. Returns all examples.
    """
    columns = columns or {}
    whole = objective.apply(rows, keys, vocabulary, columns)
    for side in (whole.inputs, whole.targets):
        assert not np.shares_memory(side.values, rows.values)
        assert (side.values[~side.filled] == vocabulary.pad).all()
        assert side.values.dtype == rows.values.dtype
    count = len(keys)
    order = np.random.default_rng(0).permutation(count)
    for chosen in (*np.arange(count)[:, None], np.arange(count // 3, count // 2 + 1), order):
        part = Padded(rows.values[chosen][:, : rows.lengths[chosen].max()], rows.lengths[chosen])
        part_columns = {name: column[chosen] for name, column in columns.items()}
        assert_alike(objective.apply(part, keys[chosen], vocabulary, part_columns), _chosen(whole, chosen))
    wide = Padded(np.pad(rows.values, ((0, 0), (0, 7)), constant_values=TEXT[0]), rows.lengths)
    assert_alike(objective.apply(wide, keys, vocabulary, columns), whole)
    return whole


def _chosen(examples: Examples, chosen: np.ndarray) -> Examples:
    """The examples of some rows."""
    sides = (Padded(side.values[chosen], side.lengths[chosen]) for side in (examples.inputs, examples.targets))
    return Examples(*sides, **{name: array[chosen] for name, array in examples.optional.items()})
