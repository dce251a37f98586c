"""Packs the documents of a bucket into rows, in one of several ways.

Documents follow each other (`concatenate`) or are rows by themselves (`complete_documents`); or several pairs of an
input and its target share a row, where segment numbers separate them (`examples`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from data_pipeline.corpus.example_rows import best_fit, in_rows
from data_pipeline.corpus.objectives.objective import Examples, Objective, Padded, ranges, together
from data_pipeline.corpus.objectives.randomness import row_keys
from data_pipeline.corpus.objectives.text_to_text import TextToText
from data_pipeline.corpus.objectives.ul2 import UL2
from data_pipeline.text.vocabulary import Vocabulary

_ROWS_AT_ONCE = 256  # of several examples: while they are made, an example takes as much memory as the longest


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
        most = tokens // int(objective.raw_lengths.min()) + 1
        drawn = objective.draw(_keys_of_denoisers(rules, most))
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
    longest = rules.objective.whole_length
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
    objective, columns = rules.objective, dict[str, np.ndarray]()
    if isinstance(objective, UL2):
        columns["denoiser"] = objective.draw(_keys_of_denoisers(rules, len(offsets) - 1))
    return Rows(tokens, offsets, offsets[:-1][first], len(documents.tokens) - len(tokens), columns)


def _keys_of_denoisers(rules: Rules, rows: int) -> np.ndarray:
    """(rows,) uint64: the keys by which UL2 draws the denoisers of a bucket's first rows."""
    return row_keys(rules.seed, f"denoiser/{rules.key}", 0, np.arange(rows))


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


def examples(documents: Documents, rules: Rules) -> Rows:
    """Puts each pair into the open row with the least room left. If it fits into none, the fullest row is closed.

    Rows hold up to `inputs_length` and `targets_length` tokens. Every example has an EOS token on both sides and its
    own segment number, from 1.
    """
    objective = rules.objective
    assert isinstance(objective, TextToText), "checked with the config"
    pairs, room = complete_documents(documents, rules), (objective.inputs_length, objective.targets_length)
    lengths, inputs = np.diff(pairs.offsets), pairs.columns["target_start"]
    row, segment = best_fit(np.stack([inputs + 1, lengths - inputs + 1], axis=1), room)  # with EOS
    rows = int(row.max(initial=-1)) + 1

    def of_rows(start: int, stop: int) -> Examples:
        own = np.flatnonzero((row >= start) & (row < stop))
        tokens = pairs.tokens[ranges(pairs.offsets[own], lengths[own])]
        keys = np.zeros(len(own), dtype=np.uint64)  # nothing is drawn
        columns = {"target_start": inputs[own]}
        one_each = objective.apply(Padded.of_flat(tokens, lengths[own]), keys, rules.vocabulary, columns)
        return in_rows(one_each, row[own] - start, segment[own], stop - start, room)

    starts = range(0, max(1, rows), _ROWS_AT_ONCE)
    bounds = [(start, min(start + _ROWS_AT_ONCE, rows)) for start in starts]
    packed = together([(np.arange(start, stop), of_rows(start, stop)) for start, stop in bounds], pad=0)
    offsets = np.append(0, np.cumsum(packed.inputs.lengths + packed.targets.lengths))
    return replace(pairs, offsets=offsets, columns={}, examples=packed)


PACKINGS: dict[str, Callable[[Documents, Rules], Rows]] = {
    "concatenate": concatenate,
    "complete_documents": complete_documents,
    "examples": examples,
}
