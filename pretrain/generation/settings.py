"""The settings of decoding. No torch is imported: settings are checked before a model is opened."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from data_pipeline.foundation.config_file import Section


class GenerationSettings(Section):
    """Decoding is greedy by default. Names and meanings are those of Hugging Face transformers.

    All lengths count generated tokens only; transformers' `min_length` also counts the decoder's start.

    - `num_beams`: above 1: beam search. The score of a hypothesis is its log probability / length^`length_penalty`, so
      a penalty above 0 favours long hypotheses.
    - `early_stopping`: a row is finished once it has `num_beams` hypotheses (true), once no running one would be better
      if it ended now (false), or once none could become better at any length ("never").
    - `no_repeat_ngram_size`: no n-gram of this size occurs twice, counting the prompt's; 0: no limit.
    - `temperature`: above 0: samples tokens from the `top_k` likeliest, and of these from the smallest set that holds
      `top_p` of their probability. `seed` and a row's number determine the samples.
    """

    max_new_tokens: PositiveInt = 128
    min_new_tokens: NonNegativeInt = 0
    no_repeat_ngram_size: NonNegativeInt = 0
    num_beams: PositiveInt = 1
    length_penalty: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: int = 0

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
