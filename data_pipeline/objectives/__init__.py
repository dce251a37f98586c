"""Pure functions from (tokens, row keys) to inputs and targets, one file for each objective."""

from typing import Annotated

from pydantic import Field

from data_pipeline.objectives.causal import CausalLM
from data_pipeline.objectives.causal_infilling import CausalInfilling
from data_pipeline.objectives.denoising import Denoising
from data_pipeline.objectives.iid_denoising import IidDenoising
from data_pipeline.objectives.in_one_row import InOneRow
from data_pipeline.objectives.masked_lm import MaskedLM
from data_pipeline.objectives.objective import Examples, Objective, Padded, together
from data_pipeline.objectives.prefix_lm import FullLM, PrefixLM
from data_pipeline.objectives.span_corruption import SpanCorruption
from data_pipeline.objectives.text_to_text import TextToText
from data_pipeline.objectives.ul2 import UL2

AnyObjective = Annotated[
    SpanCorruption
    | IidDenoising
    | PrefixLM
    | FullLM
    | UL2
    | Denoising
    | CausalLM
    | CausalInfilling
    | MaskedLM
    | TextToText,
    Field(discriminator="name"),
]
"""What rows are cut for."""
TrainingObjective = Annotated[AnyObjective | InOneRow, Field(discriminator="name")]
"""What a run may learn from rows."""

__all__ = [
    "UL2",
    "AnyObjective",
    "Denoising",
    "Examples",
    "InOneRow",
    "Objective",
    "Padded",
    "SpanCorruption",
    "TextToText",
    "TrainingObjective",
    "together",
]
