"""Counts by rule, with a few real examples of what each rule dropped."""

import zlib
from collections import Counter
from collections.abc import Mapping
from functools import cached_property

EXAMPLES = 3
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
        kept = self._kept.setdefault(rule, {})
        if len(kept) < EXAMPLES:
            kept[key] = example
        elif key < max(kept) and key not in kept:
            del kept[max(kept)]
            kept[key] = example


def most_common(counts: Mapping[str, int], number: int) -> dict[str, int]:
    """The most frequent keys, sorted by count and then by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:number])


def smallest(examples: list[str]) -> list[str]:
    """Those of `examples` that a single tally would have kept."""
    return sorted(dict.fromkeys(examples), key=_hash)[:EXAMPLES]


def _hash(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))  # fast: many lines are dropped
