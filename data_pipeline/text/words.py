"""The words of many texts at once, as arrays: where they lie, and hashes of words and of runs of words.

Python's own `split` and `hash` take a call for each word. NumPy does the same here for 100 kB of text at a time.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_PLANE = 1 << 16  # the code points of Unicode's basic plane
_PIECE = 1 << 17  # characters: their arrays fit into a cache
_LONGEST = 1 << 16  # characters of a word, so that memory is bounded
_UNSPACED = (  # scripts that are written without spaces between words
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # kana
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
)
# For each seed, the odd bases of the polynomials over the characters of a word and over the words of a run.
_BASES = (
    (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93),
    (0xC2B2AE3D27D4EB4F, 0xA0761D6478BD642F),
)
_MIX = np.uint64(0xFF51AFD7ED558CCD)


class Alphabet:
    """What counts as a word: a longest run of characters that don't separate words. NUL always does.

    `fold(character)` is the character it counts as, or "" for one that separates words; `beyond`: whether characters
    beyond the basic plane belong to words (unfolded) or separate them. In scripts without spaces each character is a
    word. Longer words than 65,536 characters are cut.
    """

    def __init__(self, fold: Callable[[str], str], beyond: bool):
        folded = [fold(chr(code)) for code in range(_PLANE)]
        self.values = np.array([ord(one[0]) if one else 0 for one in folded], dtype=np.uint16)
        self.beyond = beyond
        self.alone = np.zeros(_PLANE, dtype=bool)
        for first, last in _UNSPACED:
            self.alone[first : last + 1] = self.values[first : last + 1] != 0
        self.alone[-1] = False  # stands for all characters beyond

    def scan(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(value of each character, 0 between words, starts of the words, their ends).

        `text` begins and ends with white space.
        """
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        values = self.values.take(codes, mode="clip")
        highest = int(codes.max())
        if highest >= _PLANE:
            values = np.where(codes < _PLANE, values, codes if self.beyond else np.uint16(0))
        inside = values != 0
        if highest >= _UNSPACED[0][0] and self.alone.take(codes[codes >= _UNSPACED[0][0]], mode="clip").any():
            alone = self.alone.take(codes, mode="clip")
            cut = alone[1:] | alone[:-1]
            starts = np.flatnonzero(inside[1:] & (~inside[:-1] | cut)) + 1
            ends = np.flatnonzero(inside[:-1] & (~inside[1:] | cut)) + 1
        else:
            edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
            starts, ends = edges[::2], edges[1::2]
        if len(starts) and int((ends - starts).max()) > _LONGEST:
            starts, ends = _cut(starts, ends)
        return values, starts, ends


def _cut(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of the words with the longest ones in parts of `_LONGEST` characters."""
    parts = -(-(ends - starts) // _LONGEST)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = np.repeat(starts, parts) + number * _LONGEST
    return starts, np.minimum(starts + _LONGEST, np.repeat(ends, parts))


@functools.cache
def exact() -> Alphabet:
    """Words as white space separates them: "Ulm, 1890."  ->  "Ulm,", "1890." """
    return Alphabet(lambda character: "" if character.isspace() else character, beyond=True)


@functools.cache
def normalised() -> Alphabet:
    """Words of letters and digits, in lower case: "Ulm, 1890."  ->  "ulm", "1890" """
    return Alphabet(lambda character: character.lower() if character.isalnum() else "", beyond=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """The text `number`, or a part of it that begins with the word `word` at the character `character`."""

    number: int
    text: str
    word: int = 0
    character: int = 0


def pieces(number: int, text: str, alphabet: Alphabet, shared: int, size: int = _PIECE) -> Iterator[Piece]:
    """A text in pieces of about `size` characters, so that memory doesn't grow with it.

    Successive pieces share `shared` words: each run of `shared` + 1 words lies in exactly one piece.
    """
    word, at, reach = 0, 0, size
    while at + reach < len(text):
        part = text[at : at + reach]
        _, starts, ends = alphabet.scan(f"\n{part}\n")
        whole = len(starts) - 1  # the last word may be cut
        if whole <= shared:
            reach *= 2
            continue
        yield Piece(number, part[: ends[whole - 1] - 1], word, at)
        word, at, reach = word + whole - shared, at + int(starts[whole - shared]) - 1, size
    yield Piece(number, text[at:], word, at)


def batches(texts: Iterable[tuple[int, str]], alphabet: Alphabet, shared: int, size: int = _PIECE) -> Iterator["Words"]:
    """The words of numbered texts, some of them at a time, in order. `shared`: see `pieces`."""
    waiting: list[Piece] = []
    characters = 0
    for number, text in texts:
        for piece in pieces(number, text, alphabet, shared, size):
            waiting.append(piece)
            characters += len(piece.text)
            if characters >= size:
                yield Words(waiting, alphabet)
                waiting, characters = [], 0
    if waiting:
        yield Words(waiting, alphabet)


def bounds(text: str, alphabet: Alphabet) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of the words of `text`, in characters: "Ulm is old"  ->  [0, 4, 7], [3, 6, 10]"""
    found = []
    for piece in pieces(0, text, alphabet, shared=0):
        _, starts, ends = alphabet.scan(f"\n{piece.text}\n")
        found.append(np.stack([starts, ends]) + (piece.character - 1))
    starts, ends = np.concatenate(found, axis=1)
    return starts, ends


class Words:
    """The words of some pieces of text.

    `text`: the pieces, one after the other; `starts`, `ends` (n,): where the words lie in it; `first`, `count`
    (pieces,): the first word of each piece, and how many it has; `piece` (n,): the piece that each word is in.
    """

    def __init__(self, pieces: Sequence[Piece], alphabet: Alphabet):
        self.pieces = pieces
        self.text = "\n".join(["", *(piece.text for piece in pieces), ""])
        self._values, self.starts, self.ends = alphabet.scan(self.text)
        after = np.cumsum([1 + len(piece.text) for piece in pieces])
        stops = np.searchsorted(self.starts, after)
        self.count = np.diff(stops, prepend=0)
        self.first = stops - self.count
        self.piece = np.repeat(np.arange(len(pieces)), self.count)
        self._prefixes: dict[int, np.ndarray] = {}

    @functools.cached_property
    def places(self) -> np.ndarray:
        """(n,) uint64: the place of each word in its text: number of the text << 32 | number of the word."""
        before = np.array([piece.number << 32 | piece.word for piece in self.pieces], dtype=np.uint64)
        offsets = before - self.first.astype(np.uint64)
        return offsets[self.piece] + np.arange(len(self.starts), dtype=np.uint64)

    def within(self, firsts: np.ndarray, length: int) -> np.ndarray:
        """Of the runs of `length` words that begin with the words `firsts`, those that lie in one piece."""
        firsts = firsts[firsts <= len(self.starts) - length]
        return firsts[self.piece[firsts] == self.piece[firsts + (length - 1)]]

    def runs(self, length: int, seed: int) -> np.ndarray:
        """(n - length + 1,) uint64: a hash of each run of `length` words, also of those that cross pieces.

        Hashes of equal runs are equal wherever they stand. Those of seeds 0 and 1 together have 128 bits.
        """
        count = len(self.starts) - length + 1
        if count <= 0:
            return np.zeros(0, dtype=np.uint64)
        _, inverses = _powers(_BASES[seed][1], len(self.starts))
        prefix = self._prefix(seed)
        return (prefix[length:] - prefix[:-length]) * inverses[:count]

    def some_runs(self, firsts: np.ndarray, length: int, seed: int) -> np.ndarray:
        """The hashes of the runs of `length` words that begin with the words `firsts`."""
        _, inverses = _powers(_BASES[seed][1], len(self.starts))
        prefix = self._prefix(seed)
        return (prefix[firsts + length] - prefix[firsts]) * inverses[firsts]

    def _prefix(self, seed: int) -> np.ndarray:
        """(n + 1,): the hashes of all runs that begin with the first word."""
        if seed not in self._prefixes:
            of_characters, of_words = _BASES[seed]
            powers, inverses = _powers(of_characters, len(self._values))
            sums = self._values * powers[: len(self._values)]
            np.cumsum(sums, out=sums)
            hashes = (sums[self.ends - 1] - sums[self.starts - 1]) * inverses[self.starts]
            hashes ^= hashes >> np.uint64(32)
            hashes *= _MIX
            hashes ^= hashes >> np.uint64(29)
            prefix = np.zeros(len(hashes) + 1, dtype=np.uint64)
            np.cumsum(hashes * _powers(of_words, len(hashes))[0][: len(hashes)], out=prefix[1:])
            self._prefixes[seed] = prefix
        return self._prefixes[seed]


def _powers(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """At least `count` powers of `base` and of its inverse, modulo 2⁶⁴."""
    return _powers_of_two(base, max(_PIECE, 1 << count.bit_length()))


@functools.lru_cache(maxsize=16)
def _powers_of_two(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    factors = np.repeat(np.array([[base], [pow(base, -1, 2**64)]], dtype=np.uint64), count, axis=1)
    factors[:, 0] = 1
    powers, inverses = np.cumprod(factors, axis=1)
    return powers, inverses
