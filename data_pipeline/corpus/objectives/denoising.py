"""Denoising: BART's objective (Lewis et al. 2020, section 2.2), by the rules of fairseq's `DenoisingDataset`."""

import math
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from data_pipeline.corpus.objectives.objective import LONGEST, Columns, Examples, Objective, Padded, ranges
from data_pipeline.corpus.objectives.randomness import random_bits
from data_pipeline.text.vocabulary import Vocabulary

# streams of random numbers; an insertion has two: for positions, and the next one for random tokens
_SENTENCES, _SPAN_LENGTHS, _SPANS, _IS_RANDOM, _RANDOM_TEXT, _EMPTY_SPANS, _INSERTED, _ROTATION = 0, 1, 2, 3, 4, 5, 7, 9

_INDEX_BITS = LONGEST.bit_length() - 1  # the lowest bits of a random number hold a position; the other 44 rank it


class Denoising(Objective):
    """BART's noising: the encoder reads a noised row, the decoder writes the original row.

    Worked example, with `<s>` for BOS, `</s>` for EOS and "." as part of the word before it: two sentences change
    places; 4 of 11 words are noised, in spans of three and one; an empty span adds a mask.

        row      The cat sat . It was a warm day and nobody spoke .
        inputs   <s> It <mask> day and nobody <mask> The <mask> cat sat . </s>
        targets  <s> The cat sat . It was a warm day and nobody spoke . </s>

    Noise is applied in this order. It never changes BOS and EOS, and all targets are predicted.

    1. ⌈`permute_sentence_ratio` · sentences⌉ of a row's sentences, chosen at random, change places with one another.
       A sentence ends at a token of `vocabulary.sentence_ends` or at the row's last token, unless the token before it
       is also one of `sentence_ends`. As in the reference, tokens after a row's last sentence stay in place.
    2. Spans with ⌈`mask_ratio` · words⌉ words in all are noised. Each starts at a different random word. Overlapping
       spans merge and the row's end cuts them, so that at the defaults 27 % of the words are noised, not 30 %. Tokens
       before the first word start are never noised. Empty spans are masks inserted at random positions, whatever
       `replace_length`. With probability `random_ratio` a span's masks are random tokens of the text instead.
    3. ⌈`insert_ratio` · length⌉ tokens are inserted at random positions: ⌈`random_ratio` · their number⌉ random tokens,
       the others masks. Empty spans are divided in the same way, so that a row's only empty span becomes a random
       token, as in the reference, unless `random_ratio` is 0.
    4. With `rotate_probability` a row is rotated to begin with any of its tokens.

    Masks for empty spans are left out if they would make a row longer than `raw_length`. This is rare, unless nothing
    is deleted (-1) or `poisson_lambda` is near 1.

    Unlike in the reference, random tokens are never special tokens, ⌈ ⌉ rounds the exact product where floats would
    give one more, and "subword" can be combined with -1.
    """

    name: Literal["denoising"] = "denoising"
    length: int = Field(512, ge=3, le=LONGEST)
    """Maximum number of tokens of the encoder's input, BOS and EOS included."""
    mask_ratio: float = Field(0.3, ge=0, lt=1)
    """The share of a row's words in noised spans. 0: off."""
    span_length: Literal["span_poisson", "word", "subword"] = "span_poisson"
    """What a span is. `span_poisson`: words, as many as a Poisson distribution gives. `word`: one word. `subword`: one
    token."""
    poisson_lambda: float = Field(3.5, ge=1, le=16)  # from 16.2 on the reference's table has length 0 only
    """Mean of the Poisson distribution, in words."""
    replace_length: Literal[1, 0, -1] = 1
    """What replaces a span. 1: one mask (text infilling). 0: nothing (token deletion). -1: a mask for each of its
    tokens (token masking)."""
    random_ratio: float = Field(0.1, ge=0, le=1)
    """The share of the masks that are random tokens of the text instead."""
    insert_ratio: float = Field(0.0, ge=0, lt=1)
    """Number of tokens inserted at random positions, as a share of the row's length. 0: off."""
    permute_sentence_ratio: float = Field(1.0, ge=0, le=1)
    """The share of a row's sentences that change places with one another. 0: off."""
    rotate_probability: float = Field(0.0, ge=0, le=1)
    """Probability that a row is rotated to begin with any of its tokens. 0: off."""

    @model_validator(mode="after")
    def _changes_something(self) -> "Denoising":
        if not (self.mask_ratio or self.insert_ratio or self.permute_sentence_ratio or self.rotate_probability):
            raise ValueError("mask_ratio, insert_ratio, permute_sentence_ratio, rotate_probability are all 0: no noise")
        if self.raw_length < 1:
            raise ValueError(f"length: {self.length} leaves no room for text beside BOS, EOS and inserted tokens")
        return self

    @cached_property
    def raw_length(self) -> int:
        """Tokens of a row: `length` minus BOS, EOS and the tokens that `insert_ratio` adds."""
        marked = min(self.length, int(self.length / (1 + self.insert_ratio)) + 2)
        while marked + math.ceil(marked * self.insert_ratio - 1e-9) > self.length:
            marked -= 1
        return marked - 2

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, targets): at most `length` inputs; the targets are a row with BOS and EOS."""
        return self.length, self.raw_length + 2

    def problems(self, vocabulary: Vocabulary) -> list[str]:
        masks = self.insert_ratio or (self.mask_ratio and (self.replace_length or self.span_length == "span_poisson"))
        words = self.mask_ratio and self.span_length != "subword"
        lacks = {
            "a token for the beginning of a text (bos)": vocabulary.bos is None,
            "a mask token": bool(masks) and vocabulary.mask is None,
            "tokens that begin a word": bool(words) and not vocabulary.word_starts.any(),
            "tokens that end a sentence": bool(self.permute_sentence_ratio) and not vocabulary.sentence_ends.any(),
        }
        needs = [f"needs {what}; the tokenizer has none" for what, lacking in lacks.items() if lacking]
        return super().problems(vocabulary) + needs

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """Inputs (n, up to `length`) and targets (n, longest row + 2) of `rows`, each noised by its key."""
        noised = flat = _Flat(rows.values[rows.filled], rows.lengths, keys)
        if self.permute_sentence_ratio:
            noised = self._permute_sentences(noised, vocabulary)
        if self.mask_ratio:
            noised = self._mask(noised, vocabulary)
        if self.insert_ratio:
            noised = self._insert(noised, _share(noised.lengths + 2, self.insert_ratio), _INSERTED, vocabulary)
        if self.rotate_probability:
            noised = self._rotate(noised)
        return Examples(_wrapped(noised, vocabulary), _wrapped(flat, vocabulary))

    def _permute_sentences(self, rows: "_Flat", vocabulary: Vocabulary) -> "_Flat":
        boundary = vocabulary.sentence_ends[rows.tokens]
        boundary[rows.stops - 1] = True
        ends = boundary.copy()
        ends[1:] &= ~boundary[:-1]
        ends[rows.starts] = boundary[rows.starts]
        leftover = ~ends[rows.stops - 1]  # (n,): whether the row's last tokens are no sentence, and stay in place
        ends[rows.stops - 1] = True

        part_stops = np.flatnonzero(ends) + 1
        part_sizes = np.diff(part_stops, prepend=0)
        parts = _counts(part_stops - 1, rows.stops)
        sentences = parts - leftover
        moved = _share(sentences, self.permute_sentence_ratio)
        chosen = _distinct(rows.keys, _SENTENCES, sentences, moved) + np.repeat(np.cumsum(parts) - parts, moved)
        order = np.arange(len(part_stops))
        order[np.sort(chosen)] = chosen
        return rows._replace(tokens=rows.tokens[ranges((part_stops - part_sizes)[order], part_sizes[order])])

    def _mask(self, rows: "_Flat", vocabulary: Vocabulary) -> "_Flat":
        begins, ends, spans, empty = self._spans(rows, vocabulary)
        # as in the reference, tokens of several spans go to the span that begins first; a span inside another gets none
        earlier = np.maximum.accumulate(np.concatenate([[0], ends[:-1]]))
        starts = np.maximum(begins, earlier)
        sizes = np.maximum(ends - starts, 0)
        covered = ranges(starts, sizes)
        is_random = _chance(_drawn(rows.keys, _IS_RANDOM, spans), self.random_ratio)

        if self.replace_length == -1:
            masked, random = covered, ranges(starts[is_random], sizes[is_random])
        elif self.replace_length == 1:
            seen = begins >= earlier
            masked, random = begins[seen], begins[seen & is_random]
        else:
            masked = random = begins[:0]
        tokens = rows.tokens.copy()
        if len(masked):  # else the vocabulary may have no mask
            tokens[masked] = vocabulary.mask
        tokens[random] = _random_text(rows.keys, _RANDOM_TEXT, _counts(random, rows.stops), vocabulary)
        kept = np.ones(len(tokens), dtype=bool)
        kept[covered] = False
        kept[masked] = True
        lengths = np.add.reduceat(kept, rows.starts, dtype=np.int64)
        rows = rows._replace(tokens=tokens[kept], lengths=lengths)
        return self._insert(rows, np.minimum(empty, self.raw_length - lengths), _EMPTY_SPANS, vocabulary)

    def _spans(self, rows: "_Flat", vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(first token of each span, ascending; token after each span; (n,) spans; (n,) empty spans of each row)."""
        if self.span_length == "subword":
            words = np.arange(len(rows.tokens))
        else:
            words = np.flatnonzero(vocabulary.word_starts[rows.tokens])
        in_row = _counts(words, rows.stops)
        stops = np.cumsum(in_row)
        sizes, spans, empty = self._span_sizes(rows.keys, _share(in_row, self.mask_ratio))
        chosen = _distinct(rows.keys, _SPANS, in_row, spans) + np.repeat(stops - in_row, spans)
        size_at = np.zeros(len(words), dtype=np.int64)
        size_at[chosen] = sizes
        first = np.flatnonzero(size_at)
        after = np.minimum(first + size_at[first], np.repeat(stops, spans))
        # the last word of a row ends at the row's end, not at the next row's first word
        ends = np.minimum(np.append(words, len(rows.tokens))[after], np.repeat(rows.stops, spans))
        return words[first], ends, spans, empty

    def _span_sizes(self, keys: np.ndarray, budget: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(words of each span, row after row; (n,) spans of each row; (n,) empty spans drawn among them).

        A row's spans are drawn until they have its `budget` (n,) of words. The last span is cut to match it.
        """
        if self.span_length != "span_poisson":
            return np.ones(budget.sum(), dtype=np.int64), budget, np.zeros_like(budget)
        count = 8 + int(1.25 * budget.max() / self.poisson_lambda)
        while True:
            sizes = np.searchsorted(self._span_thresholds, random_bits(keys, _SPAN_LENGTHS, count), side="right")
            total = np.cumsum(sizes, axis=1)
            if (total[:, -1] >= budget).all():
                break
            count *= 2
        left = budget[:, None] - (total - sizes)
        spans = (left > 0) & (sizes > 0)
        empty = (left > 0) & (sizes == 0)
        return np.minimum(sizes, left)[spans], spans.sum(axis=1), empty.sum(axis=1)

    @cached_property
    def _span_thresholds(self) -> np.ndarray:
        """(longest span,) uint64: the length of a span is the number of thresholds up to a random number.

        As in the reference, the Poisson distribution ends at a length less likely than 1e-7, and at 127.
        """
        probabilities: list[float] = []
        while len(probabilities) < 128 and (not probabilities or probabilities[-1] >= 1e-7):
            k = len(probabilities)
            probabilities.append(math.exp(k * math.log(self.poisson_lambda) - self.poisson_lambda - math.lgamma(k + 1)))
        up_to = np.cumsum(probabilities)
        return (up_to[:-1] / up_to[-1] * 2.0**64).astype(np.uint64)

    def _insert(self, rows: "_Flat", counts: np.ndarray, stream: int, vocabulary: Vocabulary) -> "_Flat":
        """Inserts `counts` (n,) tokens into each row, anywhere between BOS and EOS."""
        if not counts.any():
            return rows
        longer = rows._replace(lengths=rows.lengths + counts)
        positions = _distinct(rows.keys, stream, longer.lengths, counts) + np.repeat(longer.starts, counts)
        tokens = np.full(longer.lengths.sum(), vocabulary.mask, dtype=rows.tokens.dtype)
        old = np.ones(len(tokens), dtype=bool)
        old[positions] = False
        tokens[old] = rows.tokens
        random = _share(counts, self.random_ratio)
        chosen = positions[ranges(np.cumsum(counts) - counts, random)]
        tokens[chosen] = _random_text(rows.keys, stream + 1, random, vocabulary)
        return longer._replace(tokens=tokens)

    def _rotate(self, rows: "_Flat") -> "_Flat":
        bits = random_bits(rows.keys, _ROTATION, 2)
        shift = _below(bits[:, 1], rows.lengths + 1)  # 0 and the whole length are both possible
        shift[~_chance(bits[:, 0], self.rotate_probability)] = 0
        starts = np.stack([rows.starts + shift, rows.starts], axis=1)
        sizes = np.stack([rows.lengths - shift, shift], axis=1)
        return rows._replace(tokens=rows.tokens[ranges(starts.ravel(), sizes.ravel())])


class _Flat(NamedTuple):
    """Rows concatenated without BOS, EOS or padding: all `tokens`, and each row's length and key, (n,)."""

    tokens: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray

    @property
    def stops(self) -> np.ndarray:
        return np.cumsum(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths


def _wrapped(rows: _Flat, vocabulary: Vocabulary) -> Padded:
    """The rows between BOS and EOS."""
    values = np.full((len(rows.lengths), rows.lengths.max() + 2), vocabulary.pad, dtype=rows.tokens.dtype)
    values[:, 0] = vocabulary.bos
    values[:, 1:-1][np.arange(rows.lengths.max()) < rows.lengths[:, None]] = rows.tokens
    values[np.arange(len(values)), rows.lengths + 1] = vocabulary.eos
    return Padded(values, rows.lengths + 2)


def _share(counts: np.ndarray, ratio: float) -> np.ndarray:
    """⌈counts · ratio⌉, also if rounding makes a product slightly too large."""
    return np.ceil(counts * ratio - 1e-9).astype(np.int64)


def _counts(positions: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """(n,): how many of the ascending `positions` lie in each row; row i ends before `stops[i]`."""
    return np.diff(np.searchsorted(positions, stops), prepend=0)


def _chance(bits: np.ndarray, probability: float) -> np.ndarray:
    """True with `probability`, for each random 64-bit number."""
    return bits * 2.0**-64 < probability


def _below(bits: np.ndarray, bound: np.ndarray | int) -> np.ndarray:
    """Numbers in 0 … bound − 1 (int64), uniform up to one in 2^64."""
    return (bits % np.asarray(bound, dtype=np.uint64)).astype(np.int64)


def _drawn(keys: np.ndarray, stream: int, counts: np.ndarray) -> np.ndarray:
    """(sum of `counts`,) uint64: `counts[i]` numbers of key i, row after row."""
    bits = random_bits(keys, stream, counts.max())
    return bits[np.arange(bits.shape[1]) < counts[:, None]]


def _random_text(keys: np.ndarray, stream: int, counts: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """(sum of `counts`,) int64: `counts[i]` random tokens of the text for key i, row after row."""
    first, stop = vocabulary.text
    return first + _below(_drawn(keys, stream, counts), stop - first)


def _distinct(keys: np.ndarray, stream: int, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(sum of `counts`,) int64: `counts[i]` distinct numbers below `sizes[i]` for key i, row after row.

    Every choice in every order is equally likely: the numbers are ranked by random numbers.
    """
    width, most = sizes.max(), counts.max()
    index = np.arange(width, dtype=np.uint64)
    low = np.uint64((1 << _INDEX_BITS) - 1)
    ranked = random_bits(keys, stream, width)
    ranked &= ~low
    ranked |= index
    ranked[index >= sizes[:, None]] = np.iinfo(np.uint64).max
    if 0 < most < width:
        ranked.partition(most - 1, axis=1)
    ranked = np.sort(ranked[:, :most], axis=1)
    return (ranked[np.arange(most) < counts[:, None]] & low).astype(np.int64)
