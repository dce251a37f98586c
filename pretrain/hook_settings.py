"""The settings of hooks: what `evaluation` of a run file may say. Doesn't import torch, as no settings do."""

from functools import reduce
from importlib.metadata import entry_points
from operator import or_
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import UserError

ENTRY_POINTS = "encdec_pretrain.hooks"


class HookSettings(Section):
    """What all hooks have. A subclass adds `hook`, a Literal with its name as the default, and `implementation`."""

    implementation: ClassVar[str]
    """The hook's class as "package.module.Class", imported when training begins. See `pretrain.evaluation.hook`."""
    needs_corpus: ClassVar[bool] = True
    """Whether the hook reads the held-out rows of `data.validation`."""
    in_training: ClassVar[bool] = False
    """Whether the hook measures training steps: a checkpoint has none."""

    hook: str
    """What is evaluated."""
    every_steps: PositiveInt = 500
    """Steps from one evaluation to the next."""
    budget_seconds: PositiveFloat | None = 60.0
    """The longest that an evaluation may take, in seconds; one that takes longer is cut, and a line says so. null: no
    limit."""


class ValidationLossSettings(HookSettings):
    """Loss, perplexity and accuracy on the held-out rows, the loss on their text alone, and that of word counts."""

    implementation: ClassVar[str] = "pretrain.evaluation.validation_loss.ValidationLoss"

    hook: Literal["validation_loss"] = "validation_loss"
    budget_seconds: PositiveFloat | None = None
    """The longest that an evaluation may take, in seconds; the loss is then that of the rows so far. null: no limit."""
    rows: PositiveInt | None = None
    """The first held-out rows of a corpus, whose loss it is; as many whole batches as hold them. null: all rows."""


class LossBreakdownSettings(HookSettings):
    """Loss and accuracy by the position of a target, by the length of its span and by the frequency of its token."""

    implementation: ClassVar[str] = "pretrain.evaluation.loss_breakdown.LossBreakdown"

    hook: Literal["loss_breakdown"] = "loss_breakdown"
    every_steps: PositiveInt = 2000
    """Steps from one evaluation to the next."""
    rows: PositiveInt = 512
    """The most held-out rows of a corpus that are looked at."""


class AttentionSettings(HookSettings):
    """Pictures of the attention of each layer and head, on one held-out row of each corpus."""

    implementation: ClassVar[str] = "pretrain.evaluation.attention.AttentionPictures"

    hook: Literal["attention"] = "attention"
    every_steps: PositiveInt = 5000
    """Steps from one evaluation to the next."""
    tokens: PositiveInt = 24
    """The most tokens on an axis; what a row has beyond them isn't shown."""


class PositionsSettings(HookSettings):
    """Pictures of what the model knows of positions: similarities of learned vectors, and curves of relative biases."""

    implementation: ClassVar[str] = "pretrain.evaluation.positions.PositionPictures"
    needs_corpus: ClassVar[bool] = False

    hook: Literal["positions"] = "positions"
    every_steps: PositiveInt = 5000
    """Steps from one evaluation to the next."""


class EmbeddingSettings(HookSettings):
    """The effective rank of the embedding matrix, the norms of its rows, and how alike their directions are."""

    implementation: ClassVar[str] = "pretrain.evaluation.embedding.EmbeddingShape"
    needs_corpus: ClassVar[bool] = False

    hook: Literal["embedding"] = "embedding"
    every_steps: PositiveInt = 1000
    """Steps from one evaluation to the next."""


class NormsSettings(HookSettings):
    """Norms of gradients, weights, updates and activations, layer by layer, of the step before the evaluation."""

    implementation: ClassVar[str] = "pretrain.evaluation.norms.Norms"
    needs_corpus: ClassVar[bool] = False
    in_training: ClassVar[bool] = True

    hook: Literal["norms"] = "norms"
    every_steps: PositiveInt = 500
    """Steps from one measured step to the next."""


class SamplesSettings(HookSettings):
    """What the model writes: blanks in held-out sentences that it fills, or their beginnings that it continues."""

    implementation: ClassVar[str] = "pretrain.evaluation.samples.Samples"

    hook: Literal["samples"] = "samples"
    number: PositiveInt = 4
    """Sentences from each corpus."""
    max_new_tokens: PositiveInt = 40
    """The longest answer, in tokens."""
    seed: int = 0
    """Seed of the blanks."""


_SHIPPED: tuple[type[HookSettings], ...] = (
    ValidationLossSettings,
    LossBreakdownSettings,
    SamplesSettings,
    AttentionSettings,
    PositionsSettings,
    EmbeddingSettings,
    NormsSettings,
)


def _found() -> dict[str, type[HookSettings]]:
    """The shipped hooks and those that installed packages offer, by name."""
    found = {str(settings.model_fields["hook"].default): settings for settings in _SHIPPED}
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            settings = entry.load()
        except Exception as error:
            raise UserError(f"the hook {entry.name} of {entry.value} can't be imported: {error}") from None
        if not (isinstance(settings, type) and issubclass(settings, HookSettings)):
            raise UserError(f"the hook {entry.name}: {entry.value} is no subclass of HookSettings")
        found[entry.name] = settings
    return found


HOOKS = _found()
SUITES = {
    "fast": ["validation_loss", "embedding"],
    "full": [str(settings.model_fields["hook"].default) for settings in _SHIPPED if not settings.in_training],
}
"""The hooks that `pretrain evaluate --suite` runs."""

if TYPE_CHECKING:
    AnyHookSettings = HookSettings
else:
    AnyHookSettings = Annotated[reduce(or_, HOOKS.values()), Field(discriminator="hook")]
    """An item of `evaluation` in a run file; `hook` selects the class."""
