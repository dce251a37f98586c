"""The base class of cleaning rules of installed packages: a section of the corpus file that cleans pages."""

from data_pipeline.base.config_file import Section
from data_pipeline.base.packages import named
from data_pipeline.text.document import Tally


class Rule(Section):
    """A cleaning rule of an installed package, with its own keys."""

    rule: str
    """The rule's name."""

    def clean(self, text: str, url: str, tally: Tally) -> str | None:
        """The cleaned text of a page; None drops the page, which `tally.document(rule, text)` must count.

        A page without text left is dropped too, and counted as `empty`.
        """
        raise NotImplementedError

    def clean_target(self, target: str, tally: Tally) -> str:
        """The cleaned target of a text-to-text pair whose text `clean` has kept."""
        return target


def offered_rule(given: object) -> object:
    """The rule that the keys `given` name. Raises ValueError if no installed package has it."""
    return named(given, "rule", "rules", Rule).model_validate(given) if isinstance(given, dict) else given
