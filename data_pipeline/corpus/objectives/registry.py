"""All objectives: those that ship, and those of installed packages."""

from typing import Annotated

from data_pipeline.base.config_file import OneOf
from data_pipeline.base.packages import Kinds
from data_pipeline.corpus.objectives.objective import Objective

_HERE = "data_pipeline.corpus.objectives"
_SHIPPED = {
    "span_corruption": f"{_HERE}.span_corruption:SpanCorruption",
    "iid_denoising": f"{_HERE}.iid_denoising:IidDenoising",
    "prefix_lm": f"{_HERE}.language_modelling:PrefixLM",
    "full_lm": f"{_HERE}.language_modelling:FullLM",
    "infilling": f"{_HERE}.infilling:Infilling",
    "ul2": f"{_HERE}.ul2:UL2",
    "denoising": f"{_HERE}.denoising:Denoising",
    "causal_lm": f"{_HERE}.language_modelling:CausalLM",
    "causal_infilling": f"{_HERE}.language_modelling:CausalInfilling",
    "masked_lm": f"{_HERE}.masked_lm:MaskedLM",
    "text_to_text": f"{_HERE}.text_to_text:TextToText",
}
_IN_ONE_ROW = {"in_one_row": f"{_HERE}.text_to_text:InOneRow"}
_OF_RUNS = Kinds("objectives", Objective, "name", _SHIPPED | _IN_ONE_ROW)
_OF_CORPORA = Kinds("objectives", Objective, "name", _SHIPPED)

AnyObjective = Annotated[Objective, OneOf("name", _OF_CORPORA)]
"""The objectives that a corpus can be built for."""
TrainingObjective = Annotated[Objective, OneOf("name", _OF_RUNS)]
"""The objectives that a run can train on."""
