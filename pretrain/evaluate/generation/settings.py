"""The settings of generation. This module doesn't import torch: settings are checked before a model is opened."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from data_pipeline.foundation.config_file import Section


class GenerationSettings(Section):
    """The settings of generation; the default is greedy decoding. Names and meanings are those of transformers.

    All lengths count generated tokens only; transformers' `min_length` also counts the decoder's start token.
    """

    max_new_tokens: PositiveInt = 128
    """The longest answer, in tokens."""
    min_new_tokens: NonNegativeInt = 0
    """The shortest answer, in tokens."""
    no_repeat_ngram_size: NonNegativeInt = 0
    """No n-gram of this size occurs twice, counting the prompt's. 0: no limit."""
    num_beams: PositiveInt = 1
    """Hypotheses of beam search. 1: no beam search."""
    length_penalty: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """A hypothesis's score is its log probability / length^penalty, so that a penalty above 0 favours long
    hypotheses."""
    early_stopping: bool | Literal["never"] = False
    """When beam search is finished. true: as soon as it has `num_beams` hypotheses. false: once no running one would be
    better if it ended now. never: once none could become better at any length."""
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Divides the logits before a token is sampled. 0: always the likeliest token."""
    top_k: PositiveInt | None = None
    """Tokens are sampled among this many of the likeliest. null: all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Tokens are sampled from the smallest set that holds this share of the probability of the `top_k` likeliest."""
    seed: int = 0
    """Seed of sampling; with a row's number it determines the samples."""

    @field_validator("early_stopping", mode="before")
    @classmethod
    def _one_of_three(cls, given: Any) -> Any:
        if str(given).lower() not in ("true", "false", "never"):
            raise ValueError(f"expected true, false or never, got {given!r}")
        return given

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens: {self.min_new_tokens} exceeds max_new_tokens, {self.max_new_tokens}")
        if self.num_beams > 1 and self.temperature > 0:
            raise ValueError("num_beams: beam search takes the likeliest tokens; temperature must be 0")
        if self.num_beams == 1 and (self.length_penalty != 1.0 or self.early_stopping is not False):
            raise ValueError("length_penalty and early_stopping are for beam search; num_beams must exceed 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1.0):
            raise ValueError("top_k and top_p are for sampling; temperature must exceed 0")
        return self
