"""Counts by rule, with a few real examples of what each rule dropped."""

from collections import Counter, defaultdict

EXAMPLES = 3
_EXAMPLE_CHARACTERS = 200


class Tally(Counter[str]):
    """A Counter that also keeps the first three examples of each rule, cut to 200 characters.

    tally.drop("line_policy", "See our privacy policy for more.")  ->  tally["line_policy"] == 1
    """

    def __init__(self, *counts: object) -> None:
        super().__init__(*counts)  # type: ignore[arg-type]
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    def drop(self, rule: str, example: str = "") -> None:
        self[rule] += 1
        if example and len(self.examples[rule]) < EXAMPLES:
            self.examples[rule].append(" ".join(example[:_EXAMPLE_CHARACTERS].split()))
