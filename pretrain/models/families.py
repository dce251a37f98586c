"""The model families. One entry holds everything that the rest of the project needs to know about a family.

Classes and modules are given by name and imported when needed, so that a run file is checked without torch.
"""

from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pretrain.models.config.autoregressive import AutoregressiveConfig
from pretrain.models.config.bart import BartConfig
from pretrain.models.config.base import ModelConfig
from pretrain.models.config.decoder_only import DecoderOnlyConfig
from pretrain.models.config.double_decoder import DoubleDecoderConfig
from pretrain.models.config.encoder_only import EncoderOnlyConfig
from pretrain.models.config.modern import ModernConfig
from pretrain.models.config.t5 import T5Config
from pretrain.models.config.t5gemma import T5Gemma2Config, T5GemmaConfig
from pretrain.models.config.vanilla import VanillaConfig

if TYPE_CHECKING:
    from pretrain.models.model import Model

_ENCODER_DECODER = ("span_corruption", "iid_denoising", "prefix_lm", "full_lm", "ul2", "denoising", "text_to_text")


@dataclass(frozen=True)
class Family:
    """A model family.

    - `config`: the class of its settings. `model`: the class of the model.
    - `objectives`: the objectives whose batches the model accepts.
    - `generates`: answers to an input, continuations of it, or None.
    - `conversion`: the module that converts it to transformers and back; None if transformers has no such model.
    - `inputs_begin_with_bos`: whether an encoder input is bos … eos rather than … eos.
    """

    config: type[ModelConfig]
    model: str
    objectives: tuple[str, ...]
    generates: Literal["answers", "continuations"] | None
    conversion: str | None
    inputs_begin_with_bos: bool = False


FAMILIES: dict[str, Family] = {
    "t5": Family(T5Config, "pretrain.models.t5.T5", _ENCODER_DECODER, "answers", "pretrain.huggingface.t5"),
    "bart": Family(
        BartConfig,
        "pretrain.models.bart.Bart",
        _ENCODER_DECODER,
        "answers",
        "pretrain.huggingface.bart",
        inputs_begin_with_bos=True,
    ),
    "t5gemma": Family(
        T5GemmaConfig, "pretrain.models.t5gemma.T5Gemma", _ENCODER_DECODER, "answers", "pretrain.huggingface.t5gemma"
    ),
    "t5gemma2": Family(
        T5Gemma2Config,
        "pretrain.models.t5gemma2.T5Gemma2",
        _ENCODER_DECODER,
        "answers",
        "pretrain.huggingface.t5gemma2",
    ),
    "modern": Family(ModernConfig, "pretrain.models.modern.Modern", _ENCODER_DECODER, "answers", None),
    "vanilla": Family(VanillaConfig, "pretrain.models.vanilla.Vanilla", _ENCODER_DECODER, "answers", None),
    "autoregressive": Family(
        AutoregressiveConfig,
        "pretrain.models.autoregressive.Autoregressive",
        ("causal_lm",),
        "continuations",
        "pretrain.huggingface.autoregressive",
    ),
    "double_decoder": Family(
        DoubleDecoderConfig, "pretrain.models.double_decoder.DoubleDecoder", ("causal_lm",), "continuations", None
    ),
    "decoder_only": Family(
        DecoderOnlyConfig,
        "pretrain.models.decoder_only.DecoderOnly",
        ("causal_lm",),
        "continuations",
        "pretrain.huggingface.decoder_only",
    ),
    "encoder_only": Family(
        EncoderOnlyConfig,
        "pretrain.models.encoder_only.EncoderOnly",
        ("masked_lm",),
        None,
        "pretrain.huggingface.encoder_only",
    ),
}

if TYPE_CHECKING:
    AnyModelConfig = ModelConfig
else:
    AnyModelConfig = Annotated[
        reduce(or_, (family.config for family in FAMILIES.values())), Field(discriminator="family")
    ]
    """The `model:` section of a run file; `family` selects the class."""


def parse(values: dict[str, Any]) -> ModelConfig:
    """Parses a config whose `family` is one of FAMILIES. Raises pydantic's ValidationError."""
    return FAMILIES[values["family"]].config.model_validate(values)


def build(config: ModelConfig) -> "Model":
    """Builds the model that `config` describes; its weights are drawn from torch's default generator."""
    module, name = FAMILIES[config.family].model.rsplit(".", 1)
    return getattr(import_module(module), name)(config)


def outline(config: ModelConfig) -> "Model":
    """Builds the model on the meta device: all names and whole shapes, no weights."""
    import torch  # takes seconds: a run file is checked without it

    with torch.device("meta"):
        return build(config)
