"""A tally that remembers each thing that was dropped, in order."""

from dataclasses import dataclass

from data_pipeline.text.tally import NO_RULES, Tally


@dataclass(frozen=True)
class Drop:
    """A page, line or span that the rule `rule` dropped. `what` is its text, or "" if the rule doesn't give it.

    `stays_on` is the document that keeps the copy, if it is known.
    """

    rule: str
    what: str = ""
    stays_on: str = ""


class Trail(Tally):
    """Notes every drop in `drops`, with its whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.drops: list[Drop] = []

    def __setitem__(self, rule: str, count: int) -> None:
        super().__setitem__(rule, count)
        if rule not in NO_RULES:
            self.drops.append(Drop(rule))

    def drop(self, rule: str, example: str = "") -> None:
        self[rule] += 1
        self.drops[-1] = Drop(rule, example)
