"""Packs the documents of a bucket into rows, in one of several ways.

Documents follow each other (`concatenate`) or are rows by themselves (`complete_documents`); or several pairs of an
input and its target share a row, where segment numbers separate them (`examples`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from data_pipeline.corpus.objectives.objective import Examples, Objective, Padded
from data_pipeline.corpus.objectives.randomness import row_keys
from data_pipeline.corpus.objectives.text_to_text import TextToText
from data_pipeline.corpus.objectives.ul2 import UL2
from data_pipeline.text.vocabulary import Vocabulary

_OPEN = 512  # rows that may still take an example
_MULTIPLE = 64


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
    keys = np.zeros(len(pairs), dtype=np.uint64)  # nothing is drawn
    one_each = objective.apply(Padded.of_flat(pairs.tokens, lengths), keys, rules.vocabulary, pairs.columns)
    packed = _in_rows(one_each, row, segment, int(row.max(initial=-1)) + 1, room)
    offsets = np.append(0, np.cumsum(packed.inputs.lengths + packed.targets.lengths))
    return replace(pairs, offsets=offsets, columns={}, examples=packed)


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
    return _in_rows(one_each, row, segment, len(tokens), (inputs, targets))


def width_of(tokens: int) -> int:
    """The width of a batch of balanced rows whose longest row has this many tokens."""
    return max(1, -(-tokens // _MULTIPLE)) * _MULTIPLE


def _in_rows(one_each: Examples, row: np.ndarray, segment: np.ndarray, count: int, widths: tuple[int, int]) -> Examples:
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


PACKINGS: dict[str, Callable[[Documents, Rules], Rows]] = {
    "concatenate": concatenate,
    "complete_documents": complete_documents,
    "examples": examples,
}
