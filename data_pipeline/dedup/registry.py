"""All steps on documents: those that ship, and those of installed packages."""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from data_pipeline.base.packages import offered
from data_pipeline.dedup.decontamination import Decontamination
from data_pipeline.dedup.equal import EqualDocuments, EqualLines, EqualSpans
from data_pipeline.dedup.minhash import NearDuplicates
from data_pipeline.dedup.newest_url import NewestUrl
from data_pipeline.dedup.step import KeyStep
from data_pipeline.dedup.substrings import Anchors, EqualSubstrings
from data_pipeline.text.cleaning.bad_words import BadWords
from data_pipeline.text.cleaning.classifier import Classifier
from data_pipeline.text.cleaning.gopher import Gopher
from data_pipeline.text.cleaning.language import Language
from data_pipeline.text.cleaning.page import CleanPage, Paragraphs
from data_pipeline.text.step import Step

_RULES: tuple[type[Step], ...] = (CleanPage, Paragraphs, Gopher, Language, BadWords, Classifier, Decontamination)
_COMPARING: tuple[type[Step], ...] = (
    NewestUrl,
    EqualLines,
    EqualSpans,
    Anchors,
    EqualSubstrings,
    EqualDocuments,
    NearDuplicates,
)


def name_of(step: type[Step]) -> str:
    """The name of a class of steps."""
    return str(step.model_fields["step"].default)


READS_TEXT = {name_of(step) for step in _RULES} | {name_of(EqualLines), name_of(EqualSpans)}
"""The steps that ship and can't read documents without text. What a package's step reads is not known."""
STEPS: dict[str, type[Step]] = {name_of(step): step for step in (*_RULES, *_COMPARING)}
STEPS |= offered("steps", Step, STEPS, "step")
"""All steps by name: those that ship, in their order, and those of installed packages."""


def key_steps() -> dict[str, type[KeyStep]]:
    """The steps that compare documents, by name."""
    return {name: step for name, step in STEPS.items() if issubclass(step, KeyStep)}


if TYPE_CHECKING:
    AnyStep = Step
else:
    _LISTED: Any = reduce(or_, (step for name, step in STEPS.items() if step is not Anchors))
    _NAMED = BeforeValidator(lambda given: {"step": given} if isinstance(given, str) else given)
    AnyStep = Annotated[_LISTED, Field(discriminator="step"), _NAMED]
    """An item of the list `steps`: a step's name, or keys and values."""
