"""What a tokenizer's ids mean, for objectives and models, which don't need the tokenizer's library."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer by their role; None for a token that the tokenizer lacks.

    Attributes:
        size: the number of ids.
        text: (first, end), the range of ids that are text; random replacements are drawn from it.
        first_sentinel: the id of sentinel 0.
        sentinels: the number of sentinels.
        special: the ids of all other special tokens by name, such as "[R]".
        word_starts, sentence_ends: (size,) bool, which ids begin a word and which end a sentence.
        texts: the text of each id, "" for ids without text; () before the tokenizer is trained.
        sentinel_step: what is added to a sentinel's id for the next one's: -1 as in T5, 1 as in ByT5.
    """

    size: int
    text: tuple[int, int]
    pad: int
    eos: int
    unk: int | None
    bos: int | None = None
    mask: int | None = None
    first_sentinel: int = -1
    sentinels: int = 0
    special: dict[str, int] = field(default_factory=dict)
    word_starts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)
    sentence_ends: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)
    texts: tuple[str, ...] = field(default=(), repr=False)
    sentinel_step: int = -1

    @property
    def start(self) -> int:
        """The decoder's start token of families without one of their own: bos, or eos without bos, as in BART."""
        return self.eos if self.bos is None else self.bos

    def sentinel(self, number: int) -> int:
        """The id of sentinel `number`, from 0."""
        return self.first_sentinel + self.sentinel_step * number

    @property
    def sentinel_ids(self) -> range:
        """All sentinels, in ascending order of their ids."""
        last = self.sentinel(self.sentinels - 1)
        start = min(self.first_sentinel, last) if self.sentinels else self.first_sentinel + 1
        return range(start, start + self.sentinels)
