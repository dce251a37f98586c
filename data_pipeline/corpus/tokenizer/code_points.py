"""Counts of the characters of texts."""

import numpy as np


class CodePoints:
    """Counts the characters of texts."""

    def __init__(self) -> None:
        self._seen = np.zeros(0, dtype=np.int64)  # how often each code point occurs

    def add(self, text: str) -> None:
        counts = np.bincount(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32))
        if len(counts) > len(self._seen):
            counts, self._seen = self._seen, counts
        self._seen[: len(counts)] += counts

    @property
    def counts(self) -> dict[str, int]:
        """The number of each character, in the order of their code points."""
        return {chr(code): int(self._seen[code]) for code in np.flatnonzero(self._seen)}
