"""What a package of one's own offers as a cleaning rule."""

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.plugins import named
from data_pipeline.text.tally import Tally


class Rule(Section):
    """A cleaning rule of an installed package, with its own keys."""

    rule: str
    """The rule's name."""

    def clean(self, text: str, url: str, tally: Tally) -> str | None:
        """What is left of the text of a page, or None if the page is dropped. `tally.drop(rule, text)` counts it."""
        raise NotImplementedError


def rule_of(given: object) -> object:
    """The rule that the keys `given` ask for, of an installed package. Raises ValueError if there is none."""
    return named(given, "rule", "rule", Rule).model_validate(given) if isinstance(given, dict) else given
