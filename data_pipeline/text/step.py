"""The base classes of steps on documents, in the order that a corpus file gives them.

A `Rule` looks at each document by itself. Neighbouring rules are applied in one reading of the documents. A step that
compares documents is a `KeyStep` (`dedup/step.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from data_pipeline.base import packages
from data_pipeline.base.config_file import Section
from data_pipeline.engine.context import Context
from data_pipeline.text.document import Document, Dropped, Tally

Row = tuple[int, Document, Document | None]
"""(number in the unit, document as stored, what is left of the document or None)"""


class Step(Section):
    """A step on documents: its settings, and a version.

    Attributes:
        version: a number to raise when the step leaves other documents than before.
        prepared: True if another stage writes what the step needs. Such a rule isn't applied while inputs are read.
    """

    step: str
    """The step's name."""

    version: ClassVar[int] = 1
    prepared: ClassVar[bool] = False

    @property
    def memory(self) -> int:
        """The bytes that a worker holds for the step, whatever its documents."""
        return 0

    @property
    def identity(self) -> list[object]:
        """All that the step's result depends on: settings, version, the package that offers it, contents of files."""
        return [self.model_dump(), self.version, self.package, *self.contents]

    @property
    def package(self) -> str:
        """The installed package that offers the step, with its version; "" for a step that ships."""
        ships = type(self).__module__.startswith("data_pipeline.")  # a look-up takes 7 ms
        return "" if ships else packages.offering("steps", self.step)

    @property
    def contents(self) -> list[str]:
        """The checksums of the files that the settings name."""
        return []

    @property
    def expanded(self) -> Sequence["Step"]:
        """The steps that this step consists of, in order."""
        return [self]

    def described(self) -> dict[str, object]:
        """The settings as a manifest has them: without paths of this machine."""
        return self.model_dump()

    def check(self) -> None:
        """Raises UserError if a file that the settings name can't be used."""


class Rule(Step):
    """A step that takes each document by itself."""

    sources: list[str] = []
    """Names of the sources whose documents the rule takes. []: all sources."""

    def takes(self, source: str) -> bool:
        """Whether the rule takes the documents of the source of this name."""
        return not self.sources or source in self.sources

    def apply(self, document: Document, tally: Tally) -> Document | Dropped:
        """What is left of a document, or why it is dropped. A document without text left is dropped anyway. The id and
        the source stay.

        `tally` counts what is dropped inside the document: lines, spans, masked data.
        """
        raise NotImplementedError

    def left(self, context: Context, rows: Iterable[Row], tally: Tally) -> Iterator[Row]:
        """`rows`, in order, with what the rule leaves of each document. Counts the dropped documents."""
        rules = [loaded_once(self, context)]
        for number, document, left in rows:
            yield number, document, left if left is None else cleaned(left, rules, tally)


def memory_of(steps: Iterable[Step]) -> int:
    """The bytes that a worker holds for `steps`. Steps with the same settings share what they hold."""
    return sum({step.model_dump_json(): step.memory for step in steps}.values())


def loaded_once(rule: Rule, context: Context) -> Rule:
    """The rule with the settings of `rule` that all units of a stage use in this process, with what it has loaded."""
    return context.cached(f"rule {rule.model_dump_json()}", lambda: rule)


def cleaned(document: Document, rules: Sequence[Rule], tally: Tally) -> Document | None:
    """What `rules` leave of a document, one after the other; None if a rule drops it, which is counted."""
    for rule in rules:
        left = rule.apply(document, tally)
        if isinstance(left, Document) and left.text is not document.text and not left.text.strip():
            left = Dropped("empty", document.url or document.text)
        if isinstance(left, Dropped):
            tally.drop(rule.step, document, left)
            return None
        document = left
    return document
