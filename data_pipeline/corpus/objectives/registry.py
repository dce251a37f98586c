"""All objectives: those that ship, and those of installed packages."""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from data_pipeline.base.packages import offered
from data_pipeline.corpus.objectives.denoising import Denoising
from data_pipeline.corpus.objectives.iid_denoising import IidDenoising
from data_pipeline.corpus.objectives.language_modelling import CausalInfilling, CausalLM, FullLM, PrefixLM
from data_pipeline.corpus.objectives.masked_lm import MaskedLM
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.corpus.objectives.text_to_text import InOneRow, TextToText
from data_pipeline.corpus.objectives.ul2 import UL2

_SHIPPED: tuple[type[Objective], ...] = (
    SpanCorruption,
    IidDenoising,
    PrefixLM,
    FullLM,
    UL2,
    Denoising,
    CausalLM,
    CausalInfilling,
    MaskedLM,
    TextToText,
)

if TYPE_CHECKING:
    AnyObjective = Objective
    TrainingObjective = Objective
else:
    _NAMES = [objective.model_fields["name"].default for objective in (*_SHIPPED, InOneRow)]
    _ALL = reduce(or_, (*_SHIPPED, *offered("objectives", Objective, _NAMES, "name").values()))
    AnyObjective = Annotated[_ALL, Field(discriminator="name")]
    """The objectives that a corpus can be built for."""
    TrainingObjective = Annotated[_ALL | InOneRow, Field(discriminator="name")]
    """The objectives that a run can train on."""
