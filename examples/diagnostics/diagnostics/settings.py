"""The settings of the hooks: items of `evaluation` in a run file. This module doesn't import torch."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from pretrain.config.evaluation import HookSettings


class LossBreakdownSettings(HookSettings):
    """Loss and accuracy by position of the target token, by length of its span and by frequency of the token."""

    implementation: ClassVar[str] = "diagnostics.loss_breakdown.LossBreakdown"

    hook: Literal["loss_breakdown"] = "loss_breakdown"
    every_steps: PositiveInt = 2000
    rows: PositiveInt = 512
    """Maximum number of held-out rows of each corpus to evaluate."""


class ContinuationSettings(HookSettings):
    """How well the model continues a text: the likelihood of the second half of held-out rows, given the first half.
    For models that fill masked spans, also the likelihood of a row's middle, given the text before and after it."""

    implementation: ClassVar[str] = "diagnostics.continuation.Continuation"

    hook: Literal["continuation"] = "continuation"
    every_steps: PositiveInt = 1000
    budget_seconds: PositiveFloat | None = None
    """Maximum duration of an evaluation, in seconds. A longer evaluation leaves out the following corpora and middles.
    null: no limit."""
    rows: PositiveInt = 256
    """Maximum number of held-out rows of each corpus to score."""
    infilling_length: PositiveInt | None = None
    """Tokens of the middle to fill in. null: a third of the row."""
    form: Literal["answer", "blank", "copy"] | None = None
    """The form of prompts for an encoder-decoder, as in `pretrain evaluate --form`. null: the form that suits the
    corpus's objective."""
    mode: str | None = None
    """A special token before every input, such as UL2's `[R]`. null: no token."""

    def problems(self, held_out: Mapping[str, str]) -> list[str]:
        unfit = [name for name, objective in held_out.items() if objective.split()[-1] in ("masked_lm", "text_to_text")]
        return [f"hook: {name} has no texts to continue ({held_out[name]})" for name in unfit]


class AttentionSettings(HookSettings):
    """Pictures of the attention weights of each layer and head, on one held-out row of each corpus."""

    implementation: ClassVar[str] = "diagnostics.attention_maps.AttentionPictures"

    hook: Literal["attention"] = "attention"
    every_steps: PositiveInt = 5000
    tokens: PositiveInt = 24
    """Maximum number of tokens on an axis; longer rows are cut."""


class PositionsSettings(HookSettings):
    """Pictures of how the model represents positions: similarities of learned embeddings, curves of relative biases."""

    implementation: ClassVar[str] = "diagnostics.vectors.PositionPictures"
    needs_corpus: ClassVar[bool] = False

    hook: Literal["positions"] = "positions"
    every_steps: PositiveInt = 5000


class EmbeddingSettings(HookSettings):
    """The effective rank of the embedding matrix, the norms of its rows, and the similarity of their directions."""

    implementation: ClassVar[str] = "diagnostics.vectors.EmbeddingShape"
    needs_corpus: ClassVar[bool] = False

    hook: Literal["embedding"] = "embedding"
    every_steps: PositiveInt = 1000


class NormsSettings(HookSettings):
    """Norms of gradients, weights, updates and activations by layer, at the step before the evaluation."""

    implementation: ClassVar[str] = "diagnostics.norms.Norms"
    needs_corpus: ClassVar[bool] = False
    in_training: ClassVar[bool] = True

    hook: Literal["norms"] = "norms"
    every_steps: PositiveInt = 500
    """Steps between measured steps."""
