"""Two texts in each row; the second may or may not follow the first: BERT's packing (Devlin et al. 2018, A.2)."""

from collections.abc import Iterator

import numpy as np

from data_pipeline.objectives.randomness import random_bits, row_keys
from data_pipeline.packing.rows import Documents, Rows, Rules

_SHORT = 0.1  # share of rows that are made shorter than a full row
_TRIES = 10  # to draw a different document
_DRAWS = 7 + _TRIES
_AT_ONCE = 1024

Span = tuple[int, int]


def sentence_pairs(documents: Documents, rules: Rules) -> Rows:
    """A document's sentences are gathered until they fill a row, then split in two at random. Half of the second texts
    are replaced by sentences of another document; the replaced sentences begin the next row.

    The columns are "second_start", the number of tokens before the second text, and "is_next", 1 if it follows the
    first. A text that is too long loses tokens at both ends; how many at each end is drawn uniformly.
    """
    limit = rules.objective.raw_length
    sentences = _sentences(documents, rules.vocabulary.sentence_ends)
    draws = _draws(rules)
    spans: list[tuple[Span, Span]] = []
    follows: list[bool] = []
    dropped = 0
    for number, bounds in enumerate(sentences):
        at, last = 0, len(bounds) - 1
        while at < last:
            drawn = next(draws)
            target = limit if drawn[0] >= _SHORT * 2.0**64 else 2 + drawn[1] % (limit - 1)
            stop = _until(bounds, at, target)
            cut = at + 1 + drawn[2] % max(1, stop - at - 1)
            first = int(bounds[at]), int(bounds[cut])
            if stop - at > 1 and drawn[3] & 1:
                second, at, is_next = (int(bounds[cut]), int(bounds[stop])), stop, True
            else:
                length = max(1, target - _length(first))
                second, at, is_next = _elsewhere(sentences, number, length, drawn), cut, False
            kept = _shorten(first, second, limit, drawn[5], drawn[6])
            spans.append(kept)
            dropped += _length(first) - _length(kept[0]) + is_next * (_length(second) - _length(kept[1]))
            follows.append(is_next)
    lengths = np.array([[_length(first), _length(second)] for first, second in spans], dtype=np.int64).reshape(-1, 2)
    offsets = np.append(0, np.cumsum(lengths.sum(axis=1)))
    texts = (documents.tokens[slice(*span)] for pair in spans for span in pair)
    tokens = np.concatenate([documents.tokens[:0], *texts])
    columns: dict[str, np.ndarray] = {
        "second_start": lengths[:, 0].astype(np.int32),
        "is_next": np.array(follows, dtype=np.uint8),
    }
    return Rows(tokens, offsets, offsets[:-1], dropped, columns)


def _sentences(documents: Documents, sentence_ends: np.ndarray) -> list[np.ndarray]:
    """For each document that has tokens: the starts of its sentences in the flat array, and its end."""
    ends = np.flatnonzero(sentence_ends[documents.tokens]) + 1
    inside = [
        ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, end)]
        for start, end in zip(documents.starts[:-1], documents.starts[1:], strict=True)
    ]
    pairs = zip(documents.starts[:-1], inside, documents.starts[1:], strict=True)
    return [np.concatenate([[start], middle, [end]]) for start, middle, end in pairs if end > start]


def _until(bounds: np.ndarray, at: int, tokens: int) -> int:
    """The index of the first boundary at least `tokens` tokens after boundary `at`; at most the last."""
    return min(max(at + 1, int(np.searchsorted(bounds, bounds[at] + tokens))), len(bounds) - 1)


def _elsewhere(sentences: list[np.ndarray], number: int, tokens: int, drawn: list[int]) -> Span:
    """Whole sentences of another document, about `tokens` tokens in all."""
    tries = [draw % len(sentences) for draw in drawn[-_TRIES:]]
    bounds = sentences[next((chosen for chosen in tries if chosen != number), tries[-1])]
    start = drawn[4] % (len(bounds) - 1)
    return int(bounds[start]), int(bounds[_until(bounds, start, tokens)])


def _shorten(first: Span, second: Span, limit: int, one: int, other: int) -> tuple[Span, Span]:
    """Cuts both to `limit` tokens together: first the longer one to the shorter's length, then both alike."""
    lengths = _length(first), _length(second)
    if sum(lengths) <= limit:
        return first, second
    kept = min(lengths[0], max(limit - lengths[1], (limit + 1) // 2))
    return _trim(first, kept, one), _trim(second, min(lengths[1], limit - kept), other)


def _trim(span: Span, length: int, draw: int) -> Span:
    start = span[0] + draw % (_length(span) - length + 1)
    return start, start + length


def _length(span: Span) -> int:
    return span[1] - span[0]


def _draws(rules: Rules) -> Iterator[list[int]]:
    """Random numbers for each row in turn."""
    start = 0
    while True:
        keys = row_keys(rules.seed, f"sentence_pairs/{rules.key}", 0, np.arange(start, start + _AT_ONCE))
        yield from random_bits(keys, 0, _DRAWS).tolist()
        start += _AT_ONCE
