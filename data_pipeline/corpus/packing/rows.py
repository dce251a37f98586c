"""Cuts documents into rows: the types of all packings, and the packings without segments.

Documents follow each other (`concatenate`), are rows by themselves (`complete_documents`), or become pairs of texts
(`sentence_pairs`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from data_pipeline.corpus.objectives.objective import Examples, Objective
from data_pipeline.corpus.objectives.randomness import random_bits, row_keys
from data_pipeline.corpus.objectives.text_to_text import TextToText
from data_pipeline.corpus.objectives.ul2 import UL2
from data_pipeline.text.vocabulary import Vocabulary

_SHORT = 0.1  # share of sentence pairs that are made shorter than a full row
_TRIES = 10  # draws of a different document
_DRAWS = 7 + _TRIES
_AT_ONCE = 1024

Span = tuple[int, int]


@dataclass(frozen=True)
class Documents:
    """The documents of one bucket in shuffled order: document i is `tokens[starts[i] : starts[i + 1]]`.

    `starts` (n + 1,). `targets` (n,): of text-to-text pairs, the number of tokens before each target.
    """

    tokens: np.ndarray
    starts: np.ndarray
    targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True)
class Rules:
    """How rows are cut.

    `keep_tail`: the last tokens become a shorter row if the objective accepts their number. `key`: names the bucket, to
    key the random numbers.
    """

    objective: Objective
    vocabulary: Vocabulary
    keep_tail: bool
    key: str
    seed: int


@dataclass(frozen=True)
class Rows:
    """Row i is `tokens[offsets[i] : offsets[i + 1]]` or, if rows are packed examples, row i of `examples`.

    Attributes:
        documents: the starts of documents in `tokens`.
        dropped: the number of tokens that are in no row.
        columns: an array (rows,) for each name.
        cut_inputs, cut_targets: the number of pairs whose input or target was too long and lost its end.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    dropped: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    examples: Examples | None = None
    cut_inputs: int = 0
    cut_targets: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1


def concatenate(documents: Documents, rules: Rules) -> Rows:
    """T5's packing (Raffel et al. 2020, section 3.1.1): documents follow each other without padding.

    Rows have exactly the objective's raw length. The rest, which doesn't fill a row, is dropped or becomes a shorter
    row. UL2's denoisers have different lengths, so each row's denoiser is drawn here and stored with the row.
    """
    offsets, columns = rows_of_tokens(len(documents.tokens), rules)
    dropped = len(documents.tokens) - int(offsets[-1])
    return Rows(documents.tokens, offsets, documents.starts[:-1], dropped, columns)


def rows_of_tokens(tokens: int, rules: Rules) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(offsets (rows + 1,), columns) of the rows of a bucket of `tokens` tokens."""
    objective = rules.objective
    columns: dict[str, np.ndarray] = {}
    if isinstance(objective, UL2):
        most = np.arange(tokens // int(objective.raw_lengths.min()) + 1)
        drawn = objective.draw(row_keys(rules.seed, f"denoiser/{rules.key}", 0, most))
        ends = np.cumsum(objective.raw_lengths[drawn], dtype=np.int64)
        rows = int(np.searchsorted(ends, tokens, side="right"))
        offsets = np.append(0, ends[:rows])
        left = tokens - int(offsets[-1])
        if rules.keep_tail and objective.denoisers[int(drawn[rows])].denoiser.accepts(left):
            offsets = np.append(offsets, tokens)
        columns["denoiser"] = drawn[: len(offsets) - 1]
    else:
        offsets = np.arange(0, tokens + 1, objective.raw_length, dtype=np.int64)
        if rules.keep_tail and objective.accepts(tokens - int(offsets[-1])):
            offsets = np.append(offsets, tokens)
    return offsets, columns


def complete_documents(documents: Documents, rules: Rules) -> Rows:
    """Each row is one document or a part of one: fairseq's `complete_doc` break mode, with which BART was trained.

    A document longer than a row is cut at the last end of a sentence that fits, or inside a sentence longer than a row.
    A text-to-text pair is truncated on each side instead; its row has the column "target_start".
    """
    if isinstance(rules.objective, TextToText):
        return _pairs(documents, rules.objective)
    longest = rules.objective.raw_length
    ends_sentence = rules.vocabulary.sentence_ends[documents.tokens]
    starts: list[int] = []
    ends: list[int] = []
    for start, end in zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True):
        while end - start > longest:
            sentence_ends = np.flatnonzero(ends_sentence[start : start + longest])
            cut = start + (int(sentence_ends[-1]) + 1 if len(sentence_ends) else longest)
            starts.append(start)
            ends.append(cut)
            start = cut
        starts.append(start)
        ends.append(end)
    lengths = np.array(ends, dtype=np.int64) - np.array(starts, dtype=np.int64)
    kept = np.array([rules.objective.accepts(length) for length in lengths.tolist()], dtype=bool)
    tokens = documents.tokens[np.repeat(kept, lengths)]
    offsets = np.append(0, np.cumsum(lengths[kept]))
    first = np.isin(np.array(starts, dtype=np.int64)[kept], documents.starts[:-1])
    return Rows(tokens, offsets, offsets[:-1][first], len(documents.tokens) - len(tokens))


def _pairs(documents: Documents, objective: TextToText) -> Rows:
    assert documents.targets is not None, "pairs are tokenized with their targets"
    lengths = np.diff(documents.starts)
    whole_inputs, whole_targets = documents.targets, lengths - documents.targets
    inputs = np.minimum(whole_inputs, objective.inputs_length - 1)
    targets = np.minimum(whole_targets, objective.targets_length - 1)
    position = np.arange(len(documents.tokens)) - np.repeat(documents.starts[:-1], lengths)
    in_target = position - np.repeat(documents.targets, lengths)
    kept = np.where(in_target < 0, position < np.repeat(inputs, lengths), in_target < np.repeat(targets, lengths))
    offsets = np.append(0, np.cumsum(inputs + targets))
    dropped = int(np.count_nonzero(~kept))
    return Rows(
        documents.tokens[kept],
        offsets,
        offsets[:-1],
        dropped,
        {"target_start": inputs.astype(np.int32)},
        cut_inputs=int(np.count_nonzero(inputs < whole_inputs)),
        cut_targets=int(np.count_nonzero(targets < whole_targets)),
    )


def sentence_pairs(documents: Documents, rules: Rules) -> Rows:
    """Two texts in each row; in half of the rows, the second follows the first. BERT's packing (Devlin et al. 2018).

    Sentences of a document that fill a row are split into two texts at random. Half of the second texts are replaced by
    sentences of another document; the replaced sentences begin the next row. A text that is too long loses tokens at
    both ends, at random.

    The columns are "second_start", the number of tokens before the second text, and "is_next", 1 if the second text
    follows the first.
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
    """For each document with tokens: the starts of its sentences in the flat array, and its end."""
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
    """Cuts two texts to `limit` tokens in all: first the longer one to the length of the shorter, then both alike."""
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
