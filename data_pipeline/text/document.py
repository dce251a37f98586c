"""One document of text, from any source, its URL as C4 compares it, and counts by rule of what is dropped."""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_SCHEME = re.compile(r"https?://(www\.)?")
_TRACKING = re.compile(r"\?(utm_|ref|feed).*")


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it is stored in `documents/*.parquet`.

    `id` is the source's name, the path relative to the source's root and the record's ordinal, so it is the same on
    every machine. `target` is set for text-to-text pairs, whose input is `text`. A field that the source doesn't give
    is "", and so is one that was not read.
    """

    id: str = ""
    text: str = ""
    url: str = ""
    title: str = ""
    language: str = ""
    source: str = ""
    split: str = ""
    timestamp: str = ""
    target: str = ""

    @property
    def digest(self) -> bytes:
        """A hash of text and target: 16 bytes, which equal documents share."""
        return hashlib.blake2b(f"{self.text}\0{self.target}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def normalize_url(url: str) -> str:
    """`url` without scheme, `www.`, tracking parameters and trailing slashes; letter case is kept (TFDS `c4_utils`).

    https://www.Example.com/a/?utm_source=x  ->  Example.com/a
    """
    return _TRACKING.sub("", _SCHEME.sub("", url)).rstrip("/")


def is_chosen(text: str, numerator: int, denominator: int) -> bool:
    """Whether `text` is in a share of all texts, as TFDS chooses them: md5 mod `denominator` is below `numerator`."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % denominator < numerator


EXAMPLES = 3
_NO_HASH = 1 << 32  # above all
_EXAMPLE_CHARACTERS = 200
# counted, but no reason to drop anything
NO_RULES = frozenset({"read", "passed", "undecodable", "truncated_xml", "line_passed", "line_seen", "substring_words"})


class Tally(Counter[str]):
    """A Counter that also keeps three different examples of each rule, cut to 200 characters.

    They are the ones with the smallest hashes, so they don't depend on the order in which texts are dropped, and the
    examples of several tallies together are three of theirs (`smallest`).

    tally.drop("line_policy", "See our privacy policy for more.")  ->  tally["line_policy"] == 1
    """

    @cached_property
    def _kept(self) -> dict[str, dict[int, str]]:
        """For each rule, its examples by hash."""
        return {}

    @cached_property
    def _largest(self) -> dict[str, int]:
        """For each rule that has enough examples, their largest hash."""
        return {}

    @property
    def examples(self) -> dict[str, list[str]]:
        """The examples of each rule, those of smallest hash first."""
        return {rule: [text for _, text in sorted(kept.items())] for rule, kept in self._kept.items()}

    def drop(self, rule: str, example: str = "") -> None:
        self[rule] += 1
        if example:
            self._keep(rule, example[:_EXAMPLE_CHARACTERS])

    def add(self, counts: Mapping[str, int], examples: Mapping[str, list[str]]) -> None:
        """Adds the counts and the examples of another tally."""
        self.update(counts)
        for rule, texts in examples.items():
            for text in texts:
                self._keep(rule, text)

    def _keep(self, rule: str, example: str) -> None:
        key = _hash(example)
        if key >= self._largest.get(rule, _NO_HASH):  # as most are
            return
        kept = self._kept.setdefault(rule, {})
        if len(kept) < EXAMPLES or key not in kept:
            kept[key] = example
        if len(kept) > EXAMPLES:
            del kept[max(kept)]
        if len(kept) == EXAMPLES:
            self._largest[rule] = max(kept)


def most_common(counts: Mapping[str, int], number: int) -> dict[str, int]:
    """The most frequent keys, sorted by count and then by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:number])


def smallest(examples: list[str]) -> list[str]:
    """Those of `examples` that a single tally would have kept."""
    return sorted(dict.fromkeys(examples), key=_hash)[:EXAMPLES]


def _hash(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))  # fast: many lines are dropped
