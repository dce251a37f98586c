"""The families of models: one entry has all that the rest of the project asks about a family.

Classes and modules are named here and imported where they are needed, so that a run file is checked without torch.
"""

from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pretrain.models.config import (
    AutoregressiveConfig,
    BartConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    T5Config,
    VanillaConfig,
)

if TYPE_CHECKING:
    from pretrain.models.model import Model

_ENCODER_DECODER = ("span_corruption", "iid_denoising", "prefix_lm", "full_lm", "ul2", "denoising", "text_to_text")


@dataclass(frozen=True)
class Family:
    """`config`: its settings. `model`: the class of the model.

    `objectives`: those whose batches the model takes. `generates`: answers to an input, continuations of it, or None.
    `interchange`: the module that translates it to transformers and back, None where transformers has no such model.
    `inputs_begin_with_bos`: whether an encoder's input stands between bos and eos, rather than before eos.
    """

    config: type[ModelConfig]
    model: str
    objectives: tuple[str, ...]
    generates: Literal["answers", "continuations"] | None
    interchange: str | None
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
    "vanilla": Family(VanillaConfig, "pretrain.models.vanilla.Vanilla", _ENCODER_DECODER, "answers", None),
    "autoregressive": Family(
        AutoregressiveConfig,
        "pretrain.models.autoregressive.Autoregressive",
        ("causal_lm",),
        "continuations",
        "pretrain.huggingface.autoregressive",
    ),
    "decoder_only": Family(
        DecoderOnlyConfig,
        "pretrain.models.decoder_only.DecoderOnly",
        ("causal_lm",),
        "continuations",
        "pretrain.huggingface.gpt2",
    ),
    "encoder_only": Family(
        EncoderOnlyConfig,
        "pretrain.models.encoder_only.EncoderOnly",
        ("masked_lm",),
        None,
        "pretrain.huggingface.bert",
    ),
}

if TYPE_CHECKING:
    AnyModelConfig = ModelConfig
else:
    AnyModelConfig = Annotated[
        reduce(or_, (family.config for family in FAMILIES.values())), Field(discriminator="family")
    ]
    """What a run file may say under `model:`; `family` chooses."""


def parse(values: dict[str, Any]) -> ModelConfig:
    """The config in `values`, whose `family` is one of FAMILIES. Raises pydantic's ValidationError."""
    return FAMILIES[values["family"]].config.model_validate(values)


def build(config: ModelConfig) -> "Model":
    """The freshly initialised model that `config` describes; torch's generator decides the weights."""
    module, name = FAMILIES[config.family].model.rsplit(".", 1)
    return getattr(import_module(module), name)(config)
