"""What a cleaning rule of another package is: a section of the corpus file that cleans pages."""

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.packages import named
from data_pipeline.text.document import Tally


class Rule(Section):
    """A cleaning rule of an installed package, with its own keys."""

    rule: str
    """The rule's name."""

    def clean(self, text: str, url: str, tally: Tally) -> str | None:
        """What is left of the text of a page, or None if the page is dropped. `tally.document(rule, text)` counts it.

        A page that is left without text is dropped too, and counted as `empty`.
        """
        raise NotImplementedError


def offered_rule(given: object) -> object:
    """The rule that the keys `given` ask for, of an installed package. Raises ValueError if there is none."""
    return named(given, "rule", "rules", Rule).model_validate(given) if isinstance(given, dict) else given
