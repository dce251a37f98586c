"""The rule `pii` of a corpus file."""

from dataclasses import replace
from typing import Literal

from data_pipeline.text.document import Document, Tally
from data_pipeline.text.step import Rule
from pii.patterns import Kind, mask


class PersonalData(Rule):
    """Replaces personal data in the text of a page, and in both sides of a pair."""

    step: Literal["pii"] = "pii"
    kinds: list[Kind] = ["email", "ip", "phone"]
    """Kinds of personal data that placeholders replace."""

    def apply(self, document: Document, tally: Tally) -> Document:
        text, target = (mask(one, self.kinds, tally) for one in (document.text, document.target))
        return replace(document, text=text, target=target)
