"""What objectives and models need to know of a tokenizer's ids; no text and no tokenizer's library."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Vocabulary:
    """Ids by what they are for. None: the tokenizer has no such token.

    `text`: ids first to last, last not included, that stand for text; a random replacement is drawn from them.
    `first_sentinel`: id of sentinel 0; sentinel k is k below it, and there are `sentinels` of them.
    `special`: every other special token by its name, "[R]".
    `word_starts`, `sentence_ends`: (size,) bool, which ids begin a word and which end a sentence.
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

    @property
    def sentinel_ids(self) -> range:
        """All sentinels, from the last to sentinel 0."""
        return range(self.first_sentinel + 1 - self.sentinels, self.first_sentinel + 1)
