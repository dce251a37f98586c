"""Masked language modelling: BERT's objective (Devlin et al. 2018, section 3.1 and appendix A.1)."""

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from data_pipeline.corpus.objectives.objective import (
    LONGEST,
    Columns,
    Examples,
    Objective,
    Padded,
    Stretch,
    concatenated,
)
from data_pipeline.corpus.objectives.randomness import random_bits, uniform
from data_pipeline.text.vocabulary import Vocabulary

_CHOICE, _REPLACEMENT = 0, 1  # streams of random numbers


class MaskedLM(Objective):
    """Masked language modelling. Of the tokens to predict some become the mask token, some a random text token, and the
    rest stay.

    The targets are the whole row; `predicted` marks those that have a loss.

        row        Thank you for inviting me to your party
        inputs     [CLS] Thank [MASK] for inviting me banana your party [SEP]
        targets    [CLS] Thank you for inviting me to your party [SEP]
        predicted  0 0 1 0 0 0 1 0 0 0

    A row is put between `[CLS]` and `[SEP]`. If the vocabulary lacks them, its BOS and EOS are used, as in
    RoBERTa; without BOS, there is only EOS.

    With `whole_words`, all tokens of a word are predicted or none. Words are taken in random order until the next word
    would exceed the share; the first word is always taken. (BERT continues with shorter words that still fit.)
    """

    gone = {"next_sentence": ([False, None], "gone; leave it out: an encoder learns from masked tokens alone")}

    name: Literal["masked_lm"] = "masked_lm"
    length: int = Field(512, ge=3, le=LONGEST)
    """Maximum number of tokens of the inputs, special tokens included."""
    mask_ratio: float = Field(0.15, gt=0, lt=1)
    """The share of a row's text tokens that are predicted: rounded, and at least one token."""
    mask_share: float = Field(0.8, ge=0, le=1)
    """The share of the predicted tokens that become the mask token."""
    random_share: float = Field(0.1, ge=0, le=1)
    """The share of the predicted tokens that become a random text token."""
    whole_words: bool = False
    """Predict all tokens of a word or none."""

    @model_validator(mode="after")
    def _shares_fit(self) -> "MaskedLM":
        if self.mask_share + self.random_share > 1 + 1e-9:
            most = f"with mask_share {self.mask_share} it can be {1 - self.mask_share:g} at most"
            raise ValueError(f"random_share: {most}, got {self.random_share:g}")
        return self

    @property
    def raw_length(self) -> int:
        """Tokens of a row without special tokens."""
        return self.length - 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length

    def problems(self, vocabulary: Vocabulary) -> list[str]:
        lacking = super().problems(vocabulary)
        if vocabulary.mask is None:
            lacking.append("masks tokens, but the vocabulary has no mask token")
        if self.whole_words and len(vocabulary.word_starts) != vocabulary.size:
            lacking.append("whole_words: the vocabulary doesn't mark which tokens begin a word")
        return lacking

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """Inputs and targets of `rows`, each masked by its key. Only text is predicted, including unknown tokens."""
        first, last = _special_tokens(vocabulary)
        begin = () if first is None else (first,)
        text = Stretch(np.zeros_like(rows.lengths), rows.lengths)
        originals = concatenated(rows, vocabulary.pad, *begin, text, last)
        values = originals.values
        candidates = (values >= vocabulary.text[0]) & (values < vocabulary.text[1])
        if vocabulary.unk is not None:
            candidates |= values == vocabulary.unk
        counts = np.count_nonzero(candidates, axis=1)
        budget = np.maximum(1, np.rint(self.mask_ratio * counts).astype(np.int64))
        if self.whole_words:
            predicted = _choose_words(keys, candidates, candidates & ~vocabulary.word_starts[values], budget)
        else:
            predicted = _choose_tokens(keys, candidates, budget)
        inputs, chosen = values.copy(), np.flatnonzero(predicted)
        counts = np.count_nonzero(predicted, axis=1)
        inputs.flat[chosen] = self._replaced(values.take(chosen), counts, keys, vocabulary)
        return Examples(Padded(inputs, originals.lengths), originals, predicted=predicted)

    def _replaced(self, tokens: np.ndarray, counts: np.ndarray, keys: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
        """The input tokens for the predicted `tokens` of all rows in order, `counts` (n,) of each row."""
        assert vocabulary.mask is not None
        most = int(counts.max(initial=0))
        bits = random_bits(keys, _REPLACEMENT, most)[np.arange(most) < counts[:, None]]
        first, end = vocabulary.text
        drawn = first + uniform(bits, end - first)
        share = (bits & np.uint64(2**32 - 1)) / 2.0**32  # the half of the bits that `uniform` does not use
        kept_or_drawn = np.where(share < self.mask_share + self.random_share, drawn, tokens)
        return np.where(share < self.mask_share, vocabulary.mask, kept_or_drawn)


def _special_tokens(vocabulary: Vocabulary) -> tuple[int | None, int]:
    """The special tokens before and after a text."""
    return vocabulary.special.get("[CLS]", vocabulary.bos), vocabulary.special.get("[SEP]", vocabulary.eos)


def _choose_tokens(keys: np.ndarray, candidates: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """(n, width) bool: `budget` (n,) of the `candidates` (n, width) of each row, every choice equally likely."""
    bits = random_bits(keys, _CHOICE, candidates.shape[1])
    bits[~candidates] = np.iinfo(np.uint64).max
    highest = np.partition(bits, np.unique(budget) - 1, axis=1)[np.arange(len(keys)), budget - 1]
    return candidates & (bits <= highest[:, None])


def _choose_words(keys: np.ndarray, candidates: np.ndarray, continuing: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """(n, width) bool: the `candidates` that belong to randomly chosen words.

    Words are taken in random order up to `budget` (n,) tokens; the first word is always taken. `continuing` (n, width)
    marks tokens that continue a word. Such a token begins its own word if the token before it isn't a candidate.
    """
    starts = candidates.copy()
    starts[:, 1:] &= ~(continuing[:, 1:] & candidates[:, :-1])
    words = np.cumsum(starts, axis=1) - 1
    count, most = len(keys), int(words.max(initial=0)) + 1
    flat = (words + np.arange(count)[:, None] * most)[candidates]
    sizes = np.bincount(flat, minlength=count * most).reshape(count, most)
    bits = random_bits(keys, _CHOICE, most)
    bits[sizes == 0] = np.iinfo(np.uint64).max
    order = np.argsort(bits, axis=1)
    taken = np.cumsum(np.take_along_axis(sizes, order, axis=1), axis=1) <= budget[:, None]
    taken[:, 0] = True
    chosen = np.empty_like(taken)
    np.put_along_axis(chosen, order, taken, axis=1)
    return candidates & np.take_along_axis(chosen, np.maximum(words, 0), axis=1)
