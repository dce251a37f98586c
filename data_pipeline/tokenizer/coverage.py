"""Which tokens of a text are unknown, or bytes of a character that the tokenizer has no token for, and of which
characters."""

import unicodedata

import numpy as np

from data_pipeline.text.tally import most_common
from data_pipeline.tokenizer.text_model import TextModel

_KEPT = 1000  # characters whose counts a part keeps


class Coverage:
    """Counts over texts and their ids.

    Characters are counted in texts with such tokens, composed first (NFC), as tokenizers do.
    """

    def __init__(self, model: TextModel):
        self._model = model
        self._kinds = np.zeros(model.size, dtype=np.uint8)
        self._kinds[sorted(model.byte_ids)] = 2
        if model.vocabulary.unk is not None:
            self._kinds[model.vocabulary.unk] = 1
        self._tokens = np.zeros(3, dtype=np.int64)
        self._seen = np.zeros(0, dtype=np.int64)  # how often each code point was
        self._waiting: list[str] = []

    def add(self, ids: np.ndarray, *texts: str) -> None:
        """Counts `ids` (n,), of the model alone, which `texts` became."""
        kinds = self._kinds[ids]
        if kinds.any():
            self._tokens += np.bincount(kinds, minlength=3)
            self._waiting += texts
            if len(self._waiting) >= 256:
                self._see()

    @property
    def tokens(self) -> dict[str, int]:
        """How many tokens are unknown, and how many are bytes."""
        return {"unknown": int(self._tokens[1]), "bytes": int(self._tokens[2])}

    @property
    def characters(self) -> dict[str, int]:
        """How often the 1,000 most frequent characters of these tokens occur, by count and then by name."""
        self._see()
        counts = {chr(code): int(self._seen[code]) for code in np.flatnonzero(self._seen)}
        encoded = self._model.encode(list(counts))
        uncovered = [character for character, ids in zip(counts, encoded, strict=True) if self._kinds[ids].any()]
        return most_common({character: counts[character] for character in uncovered}, _KEPT)

    def _see(self) -> None:
        text = unicodedata.normalize("NFC", "\n".join(self._waiting))
        self._waiting = []
        counts = np.bincount(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32))
        if len(counts) > len(self._seen):
            counts, self._seen = self._seen, counts
        self._seen[: len(counts)] += counts
