"""The rule `pii` of a corpus file."""

from typing import Literal

from data_pipeline.text.cleaning.rule import Rule
from data_pipeline.text.document import Tally
from pii.patterns import Kind, mask


class PersonalData(Rule):
    """Replaces personal data in the text of a page, and in both sides of a pair."""

    rule: Literal["pii"] = "pii"
    kinds: list[Kind] = ["email", "ip", "phone"]
    """Kinds of personal data that placeholders replace."""

    def clean(self, text: str, url: str, tally: Tally) -> str:
        return mask(text, self.kinds, tally)

    def clean_target(self, target: str, tally: Tally) -> str:
        return mask(target, self.kinds, tally)
