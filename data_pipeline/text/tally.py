"""Counts by rule, with a few real examples of what each rule dropped."""

from collections import Counter
from functools import cached_property

EXAMPLES = 3
_EXAMPLE_CHARACTERS = 200


class Tally(Counter[str]):
    """A Counter that also keeps the first three examples of each rule, cut to 200 characters.

    tally.drop("line_policy", "See our privacy policy for more.")  ->  tally["line_policy"] == 1
    """

    @cached_property
    def examples(self) -> dict[str, list[str]]:
        """The examples of each rule."""
        return {}

    def drop(self, rule: str, example: str = "") -> None:
        self[rule] += 1
        kept = self.examples.setdefault(rule, []) if example else []
        if example and len(kept) < EXAMPLES:
            kept.append(" ".join(example[:_EXAMPLE_CHARACTERS].split()))
