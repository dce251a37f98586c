"""Finds and hashes the words of many texts at once, as arrays, for deduplication and decontamination.

NumPy splits and hashes 100 kB of text at a time. Python's `split` and `hash` would need a call for each word.

In scripts without spaces, each letter counts as a word, since no rule can split the text into words. The marks after a
letter, such as vowel signs, belong to the letter, as in UAX 29.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_TABLE = 1 << 17  # code points of the first two planes; the other planes have no letters but Han, and no marks
_FIRST_CHANGE, _FIRST_MARK, _JAMO = 0x80, 0x300, slice(0x1160, 0x1200)
_SIZE, _MARK, _CHANGES = 7, 8, 16  # bits of a character's kind
_CHUNK = 1 << 17  # characters: their arrays fit into a cache
LONGEST_NGRAM = 1 << 20  # words of a run; the longest page that C4 keeps has 190,000 characters
_LONGEST = 1 << 16  # characters of a word, to bound memory
# The size of a word, and of a letter in a script without spaces. ICU's dictionaries find 1.6 letters in a Chinese word,
# 1.8 in a Japanese one, of which most are kana, and 3.0 to 3.7 in one of Thai, Lao or Khmer.
_WORD, _HAN, _KANA, _COMPLEX = 6, 4, 3, 2
_UNSPACED = (
    (0x0E00, 0x0EFF, _COMPLEX),  # Thai, Lao
    (0x1000, 0x109F, _COMPLEX),  # Burmese
    (0x1780, 0x17FF, _COMPLEX),  # Khmer
    (0x1950, 0x19DF, _COMPLEX),  # Tai Le, New Tai Lue
    (0x1A20, 0x1AAF, _COMPLEX),  # Tai Tham
    (0x3005, 0x3007, _HAN),
    (0x3040, 0x30FF, _KANA),
    (0x31F0, 0x31FF, _KANA),
    (0x3400, 0x4DBF, _HAN),
    (0x4E00, 0x9FFF, _HAN),
    (0xA9E0, 0xA9FF, _COMPLEX),  # Burmese
    (0xAA60, 0xAADF, _COMPLEX),  # Burmese, Tai Viet
    (0xF900, 0xFAFF, _HAN),
    (0x11700, 0x1174F, _COMPLEX),  # Ahom
    (0x1B000, 0x1B16F, _KANA),
    (0x20000, 0x3FFFF, _HAN),
)
# Soft hyphens, joiners, marks of direction, variation selectors: they don't change a word (UAX 29, rule WB4).
_IGNORED = re.compile(
    r"[\u00ad\u034f\u061c\u180b-\u180f\u200c-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff]"
)
# For each seed, the odd bases of the polynomials over the characters of a word and over the words of a run.
_BASES = ((0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93), (0xC2B2AE3D27D4EB4F, 0xA0761D6478BD642F))
_MIX = np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True, slots=True)
class Scan:
    """The words of a text.

    Attributes:
        values: a number for each character, 0 between words.
        starts, ends: (n,), the first character of each word, and the character after it.
        sizes: (n,), how much of a word each counts as, in units of 1/`_WORD`; None: all are whole words.
    """

    values: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray | None = None

    def stops(self, length: int) -> np.ndarray:
        """(n,): for each word, the end of the shortest run from there that counts as `length` words.

        It is larger than n if too few words follow. Three words in runs of 2  ->  [2, 3, 4]
        """
        if self.sizes is None:
            return np.arange(length, len(self.starts) + length)
        before = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        return np.searchsorted(before, before[:-1] + _WORD * length)


class Alphabet:
    """Defines words: the longest runs of characters that don't separate words. NUL always separates words.

    `fold(character)`: the character that it counts as; "" if it separates words. In scripts without spaces each letter,
    with its marks, is a word by itself. `normal`: True for decontamination and MinHash. Texts are
    NFKC; a mark after a separator also separates; in a script without spaces, a letter counts as a fraction of a word.
    Words are cut after 65,536 characters.
    """

    def __init__(self, fold: Callable[[str], str], normal: bool):
        self._fold, self._normal = fold, normal
        self._values = np.array([self._value(code) for code in range(_TABLE)], dtype=np.uint32)

    def prepared(self, text: str) -> str:
        """`text` as it is compared; `scan` takes such texts."""
        if not self._normal or text.isascii():
            return text
        codes = _codes(text)
        if not (_kinds(codes[codes >= _FIRST_CHANGE]) & _CHANGES).any():
            return text
        return unicodedata.normalize("NFKC", _IGNORED.sub("", text))

    def scan(self, text: str) -> Scan:
        """The words of `text`, which begins and ends with white space."""
        codes = _codes(text)
        values = self._values.take(codes, mode="clip")
        if (beyond := codes >= _TABLE).any():
            values[beyond] = [self._value(code) for code in codes[beyond].tolist()]
        inside = values != 0
        if not (_kinds(codes[codes >= _FIRST_MARK]) & (_SIZE | _MARK)).any():
            edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
            return Scan(values, *_cut(edges[::2], edges[1::2]))
        kinds = _kinds(codes)
        marks, sizes = (kinds & _MARK) != 0, kinds & _SIZE
        if self._normal:
            inside &= inside[np.maximum.accumulate(np.where(marks, 0, np.arange(len(codes))))]
        apart = ((sizes[1:] | sizes[:-1]) != 0) & ~marks[1:]
        starts = np.flatnonzero(inside[1:] & (~inside[:-1] | apart)) + 1
        ends = np.flatnonzero(inside[:-1] & (~inside[1:] | apart)) + 1
        starts, ends = _cut(starts, ends)
        return Scan(values, starts, ends, np.where(sizes, sizes, _WORD)[starts] if self._normal else None)

    def _value(self, code: int) -> int:
        folded = self._fold(chr(code))
        return ord(folded[0]) if folded else 0


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def _kinds(codes: np.ndarray) -> np.ndarray:
    """Bits of each code point: `_SIZE`, the size of a letter in a script without spaces; `_MARK`, whether it is a mark;
    `_CHANGES`, whether `Alphabet.prepared` may change text with it."""
    return _table_of_kinds().take(codes, mode="clip")


@functools.cache
def _table_of_kinds() -> np.ndarray:
    kinds = np.zeros(_UNSPACED[-1][1] + 2, dtype=np.uint8)
    for first, last, size in _UNSPACED:
        kinds[first : last + 1] = size
    kinds[-1] = _CHANGES  # all code points beyond the table
    kinds[_JAMO] = _CHANGES  # Jamo compose
    for code in range(_FIRST_CHANGE, _TABLE):
        character = chr(code)
        becomes = unicodedata.normalize("NFKC", character)
        if unicodedata.category(character)[0] == "M":
            kinds[code] |= _MARK | _CHANGES
        elif becomes == character:
            kinds[code] |= _CHANGES * bool(_IGNORED.match(character))
        elif any(map(str.isalnum, character + becomes)):
            kinds[code] |= _CHANGES
    return kinds


def _cut(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`starts` and `ends` of words, with longer words cut into parts of `_LONGEST` characters."""
    if not len(starts) or int((ends - starts).max()) <= _LONGEST:
        return starts, ends
    parts = -(-(ends - starts) // _LONGEST)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = np.repeat(starts, parts) + number * _LONGEST
    return starts, np.minimum(starts + _LONGEST, np.repeat(ends, parts))


@functools.cache
def exact() -> Alphabet:
    """Words between white space: "Ulm, 1890."  ->  "Ulm,", "1890." """
    return Alphabet(lambda character: "" if character.isspace() else character, normal=False)


@functools.cache
def normalised() -> Alphabet:
    """Words of letters with their marks and of digits, in lower case and NFKC: "Ulm, ⅕"  ->  "ulm", "1", "5"

    These are the words of UAX 29, also cut at punctuation inside them ("don't", "3.14"): texts are equal whatever their
    punctuation. 1.5 letters of Han, 2 of kana and 3 of Thai, Lao, Khmer or Burmese count as a word.
    """

    def fold(character: str) -> str:
        return character.lower() if character.isalnum() or unicodedata.category(character)[0] == "M" else ""

    return Alphabet(fold, normal=True)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The text `number`, or its part from the word `word` on, which begins at the character `character`."""

    number: int
    text: str
    word: int = 0
    character: int = 0


def chunks(number: int, text: str, alphabet: Alphabet, length: int, size: int = _CHUNK) -> Iterator[Chunk]:
    """A prepared text in chunks of about `size` characters, which bound the memory.

    Successive chunks overlap: each run that counts as `length` words lies in exactly one chunk.
    """
    word, at, reach = 0, 0, size
    while at + reach < len(text):
        part = text[at : at + reach]
        scan = alphabet.scan(f"\n{part}\n")
        whole = len(scan.starts) - 1  # the last word may be cut
        next_word = int(np.searchsorted(scan.stops(length), whole, "right"))
        if not next_word:
            reach *= 2
            continue
        yield Chunk(number, part[: scan.ends[whole - 1] - 1], word, at)
        word, at, reach = word + next_word, at + int(scan.starts[next_word]) - 1, size
    yield Chunk(number, text[at:], word, at)


def batches(texts: Iterable[tuple[int, str]], alphabet: Alphabet, length: int, size: int = _CHUNK) -> Iterator["Words"]:
    """The words of numbered texts, some texts at a time, in order. `length`: see `chunks`."""
    waiting: list[Chunk] = []
    characters = 0
    for number, text in texts:
        for chunk in chunks(number, alphabet.prepared(text), alphabet, length, size):
            waiting.append(chunk)
            characters += len(chunk.text)
            if characters >= size:
                yield Words(waiting, alphabet)
                waiting, characters = [], 0
    if waiting:
        yield Words(waiting, alphabet)


def bounds(text: str, alphabet: Alphabet) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of the words of a prepared text, in characters: "Ulm is old"  ->  [0, 4, 7], [3, 6, 10]"""
    found = []
    for chunk in chunks(0, text, alphabet, length=1):
        scan = alphabet.scan(f"\n{chunk.text}\n")
        found.append(np.stack([scan.starts, scan.ends]) + (chunk.character - 1))
    starts, ends = np.concatenate(found, axis=1)
    return starts, ends


class Words:
    """The words of some chunks of text.

    Attributes:
        text: the chunks, one after the other.
        starts, ends: (n,), where the words are in `text`.
        first, count: (chunks,), the first word of each chunk, and its number of words.
        chunk: (n,), the chunk of each word.
    """

    def __init__(self, chunks: Sequence[Chunk], alphabet: Alphabet):
        self.chunks = chunks
        self.text = "\n".join(["", *(chunk.text for chunk in chunks), ""])
        self._scan = alphabet.scan(self.text)
        self.starts, self.ends = self._scan.starts, self._scan.ends
        after = np.cumsum([1 + len(chunk.text) for chunk in chunks])
        stops = np.searchsorted(self.starts, after)
        self.count = np.diff(stops, prepend=0)
        self.first = stops - self.count
        self.chunk = np.repeat(np.arange(len(chunks)), self.count)
        self._prefixes: dict[int, np.ndarray] = {}
        self._stops: dict[int, np.ndarray] = {}

    @functools.cached_property
    def positions(self) -> np.ndarray:
        """(n,) uint64: the position of each word: number of the text << 32 | number of the word."""
        before = np.array([chunk.number << 32 | chunk.word for chunk in self.chunks], dtype=np.uint64)
        offsets = before - self.first.astype(np.uint64)
        return offsets[self.chunk] + np.arange(len(self.starts), dtype=np.uint64)

    def stops(self, length: int) -> np.ndarray:
        """(n,): the end of the run from each word that counts as `length` words; above n if too few words follow."""
        if length not in self._stops:
            self._stops[length] = self._scan.stops(length)
        return self._stops[length]

    def within(self, firsts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """(k,) bool: which of the runs from the words `firsts` up to, not including, `stops` (k,) lie in one chunk."""
        there = stops <= len(self.starts)
        return there & (self.chunk[firsts] == self.chunk[np.where(there, stops, 1) - 1])

    def runs(self, length: int, seed: int) -> np.ndarray:
        """(m,) uint64: a hash of each run that counts as `length` words, also across chunks.

        Equal runs have equal hashes. The hashes of seeds 0 and 1 together have 128 bits.
        """
        if self._scan.sizes is None:
            return self.hashes(slice(max(0, len(self.starts) - length + 1)), slice(length, None), seed)
        stops = self.stops(length)
        stops = stops[: np.searchsorted(stops, len(self.starts), "right")]
        return self.hashes(slice(len(stops)), stops, seed)

    def hashes(self, firsts: np.ndarray | slice, stops: np.ndarray | slice, seed: int) -> np.ndarray:
        """The hashes of the runs from the words `firsts` up to, not including, `stops`."""
        _, inverses = _powers(_BASES[seed][1], len(self.starts))
        prefix = self._prefix(seed)
        return (prefix[stops] - prefix[firsts]) * inverses[firsts]

    def _prefix(self, seed: int) -> np.ndarray:
        """(n + 1,): the hashes of all runs that begin with the first word."""
        if seed not in self._prefixes:
            character_base, word_base = _BASES[seed]
            powers, inverses = _powers(character_base, len(self._scan.values))
            sums = self._scan.values * powers[: len(self._scan.values)]
            np.cumsum(sums, out=sums)
            hashes = (sums[self.ends - 1] - sums[self.starts - 1]) * inverses[self.starts]
            hashes ^= hashes >> np.uint64(32)
            hashes *= _MIX
            hashes ^= hashes >> np.uint64(29)
            prefix = np.zeros(len(hashes) + 1, dtype=np.uint64)
            np.cumsum(hashes * _powers(word_base, len(hashes))[0][: len(hashes)], out=prefix[1:])
            self._prefixes[seed] = prefix
        return self._prefixes[seed]


def _powers(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """At least `count` powers of `base` and of its inverse, modulo 2⁶⁴."""
    return _powers_of_two(base, max(_CHUNK, 1 << count.bit_length()))


@functools.lru_cache(maxsize=16)
def _powers_of_two(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    factors = np.repeat(np.array([[base], [pow(base, -1, 2**64)]], dtype=np.uint64), count, axis=1)
    factors[:, 0] = 1
    powers, inverses = np.cumprod(factors, axis=1)
    return powers, inverses
