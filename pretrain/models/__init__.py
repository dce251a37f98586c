"""The model families: `build` makes a model from its config, and FAMILIES says what each family can do.

Model classes are named and imported when needed, so that a run file is checked without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from pretrain.config.model_config import ModelConfig
from pretrain.config.models import (
    OFFERED,
    AutoregressiveConfig,
    BartConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModernConfig,
    T5Config,
    T5Gemma2Config,
    T5GemmaConfig,
    VanillaConfig,
)

if TYPE_CHECKING:
    from pretrain.models.model import Model

_HERE = "pretrain.models"
_DENOISING = (
    "span_corruption",
    "iid_denoising",
    "prefix_lm",
    "full_lm",
    "infilling",
    "ul2",
    "denoising",
    "text_to_text",
)


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        config: the class of the settings.
        model: the class of the model, as "package.module.Class". The module may have `HF_MODELS`.
        objectives: the objectives whose batches the model accepts.
        generates: what the model writes, answers to an input or continuations of a text; None: no text.
        inputs_begin_with_bos: True if an encoder input is bos … eos, False if it is … eos.
    """

    config: type[ModelConfig]
    model: str
    objectives: tuple[str, ...] = _DENOISING
    generates: Literal["answers", "continuations"] | None = "answers"
    inputs_begin_with_bos: bool = False


def _causal(config: type[ModelConfig], model: str) -> Family:
    return Family(config, model, ("causal_lm", "causal_infilling", "in_one_row"), "continuations")


FAMILIES: dict[str, Family] = {
    "t5": Family(T5Config, f"{_HERE}.t5.T5"),
    "bart": Family(BartConfig, f"{_HERE}.bart.Bart", inputs_begin_with_bos=True),
    "t5gemma": Family(T5GemmaConfig, f"{_HERE}.t5gemma.T5Gemma"),
    "t5gemma2": Family(T5Gemma2Config, f"{_HERE}.t5gemma2.T5Gemma2"),
    "modern": Family(ModernConfig, f"{_HERE}.modern.Modern"),
    "vanilla": Family(VanillaConfig, f"{_HERE}.vanilla.Vanilla"),
    "autoregressive": _causal(AutoregressiveConfig, f"{_HERE}.autoregressive.Autoregressive"),
    "decoder_only": _causal(DecoderOnlyConfig, f"{_HERE}.decoder_only.DecoderOnly"),
    "encoder_only": Family(
        EncoderOnlyConfig, f"{_HERE}.encoder_only.EncoderOnly", objectives=("masked_lm",), generates=None
    ),
}
FAMILIES |= {name: Family(config, **config.offers) for name, config in OFFERED.items()}


def parse(values: Mapping[str, object]) -> ModelConfig:
    """The config with these values, whose `family` is one of FAMILIES. Raises pydantic's ValidationError."""
    return FAMILIES[str(values["family"])].config.model_validate(values)


def build(config: ModelConfig) -> "Model":
    """Builds the model that `config` describes; its weights are drawn from torch's default generator."""
    module, name = FAMILIES[config.family].model.rsplit(".", 1)
    return getattr(import_module(module), name)(config)


def meta_model(config: ModelConfig) -> "Model":
    """Builds the model on the meta device: with all names and unsharded shapes, without weights."""
    import torch  # 1.9 s and 190 MB: a run file is checked without it

    with torch.device("meta"):
        return build(config)
