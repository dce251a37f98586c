"""The settings of generation. This module doesn't import torch, so that settings are checked before a model is
opened."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from data_pipeline.base.config_file import Section, check
from data_pipeline.base.errors import UserError


class GenerationSettings(Section):
    """The settings of generation, with transformers' names and meanings. Default: greedy decoding.

    All lengths count generated tokens only; transformers' `min_length` also counts the decoder's start token.
    """

    max_new_tokens: PositiveInt = 128
    """Maximum length of an answer, in tokens."""
    min_new_tokens: NonNegativeInt = 0
    """Minimum length of an answer, in tokens."""
    no_repeat_ngram_size: NonNegativeInt = 0
    """No n-gram of this size repeats, the prompt included. 0: no limit."""
    num_beams: PositiveInt = 1
    """Number of beams in beam search. 1: no beam search."""
    num_return_sequences: PositiveInt = 1
    """Number of answers that beam search returns for each text, the best first."""
    length_penalty: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Beam search divides a hypothesis's log probability by length^penalty. Above 0: favours long answers."""
    early_stopping: bool | Literal["never"] = False
    """When beam search ends. `true`: as soon as `num_beams` hypotheses are finished. `false`: once no running
    hypothesis would be better if it ended now. `never`: once none could become better at any length."""
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Sampling temperature, which divides the logits. 0: greedy decoding."""
    top_k: PositiveInt | None = None
    """Sample from this many likeliest tokens. null: all tokens."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the fewest likeliest tokens that hold this share of the probability, after `top_k`. 1: all tokens."""
    seed: int = 0
    """Seed of sampling. The seed, the text and the number of a sample determine the sample."""

    @field_validator("early_stopping", mode="before")
    @classmethod
    def _one_of_three(cls, value: Any) -> Any:
        if str(value).lower() not in ("true", "false", "never"):
            raise ValueError(f"expected true, false or never, got {value!r}")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens: {self.min_new_tokens} exceeds max_new_tokens, {self.max_new_tokens}")
        if self.num_return_sequences > self.num_beams:
            raise ValueError(f"num_return_sequences: {self.num_return_sequences} exceeds num_beams, {self.num_beams}")
        if self.num_beams > 1 and self.temperature > 0:
            raise ValueError("num_beams: beam search takes the likeliest tokens; temperature must be 0")
        if self.num_beams == 1 and (self.length_penalty != 1.0 or self.early_stopping is not False):
            raise ValueError("length_penalty and early_stopping are for beam search; num_beams must exceed 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1.0):
            raise ValueError("top_k and top_p are for sampling; temperature must exceed 0")
        return self


def checked(values: Mapping[str, Any], samples: int | None = None) -> GenerationSettings:
    """The settings with these `values`. With a number of `samples`, the default temperature is 1. Raises UserError for
    wrong settings, and for samples that would all be equal."""
    if samples is None:
        return check(values, GenerationSettings, "generate")
    if values.get("num_beams", 1) != 1:
        raise UserError("samples: beam search doesn't sample; num_beams must be 1")
    settings = check({"temperature": 1.0, **values}, GenerationSettings, "generate")
    if settings.temperature == 0:
        raise UserError("samples: greedy decoding doesn't sample; temperature must exceed 0")
    return settings
