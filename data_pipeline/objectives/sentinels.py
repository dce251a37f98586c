"""Runs of tokens that become sentinels: how T5's denoising objectives make inputs and targets of a mask."""

import numpy as np

from data_pipeline.objectives.objective import Examples, Padded
from data_pipeline.text.vocabulary import Vocabulary


def with_sentinels(rows: Padded, masked: np.ndarray, vocabulary: Vocabulary) -> Examples:
    """Inputs and targets of `rows`, where the tokens at `masked` (n, longest) bool are to be predicted.

    The inputs have a sentinel for each run of masked tokens, the targets one for each run of kept tokens. If a row
    begins with a kept token, the targets are each sentinel of the inputs followed by the tokens that it replaces.
    """
    return Examples(replace_runs(rows, masked, vocabulary), replace_runs(rows, ~masked, vocabulary))


def run_starts(runs: np.ndarray) -> np.ndarray:
    """(n, length) bool: the first token of each run of True in `runs` (n, length) bool."""
    starts = runs.copy()
    np.greater(runs[:, 1:], runs[:, :-1], out=starts[:, 1:])
    return starts


def replace_runs(rows: Padded, runs: np.ndarray, vocabulary: Vocabulary) -> Padded:
    """`rows` with each run of `runs` (n, longest) bool replaced by a sentinel, numbered from the left, then EOS.

    This is T5's `noise_span_to_unique_sentinel` for all rows at once.
    """
    count, longest = rows.values.shape
    equally_long = bool((rows.lengths == longest).all())
    starts = run_starts(runs)
    kept = starts == runs  # a run's first token stays, as its sentinel
    kept = np.flatnonzero(kept if equally_long else kept & rows.filled)

    row_ends = np.arange(count + 1) * longest
    indices = np.flatnonzero(starts)
    firsts = np.searchsorted(indices, row_ends)
    numbers = np.arange(len(indices)) - np.repeat(firsts[:-1], np.diff(firsts))
    values = rows.values.flatten()
    values[indices] = vocabulary.first_sentinel - numbers

    lengths = np.diff(np.searchsorted(kept, row_ends))
    width = int(lengths.max(initial=0)) + 1
    if (lengths == width - 1).all():
        replaced = np.full((count, width), vocabulary.eos, dtype=values.dtype)
        replaced[:, :-1] = values.take(kept).reshape(count, width - 1)
    else:
        replaced = np.full((count, width), vocabulary.pad, dtype=values.dtype)
        replaced[np.arange(width) < lengths[:, None]] = values.take(kept)
        replaced[np.arange(count), lengths] = vocabulary.eos
    return Padded(replaced, lengths + 1)
