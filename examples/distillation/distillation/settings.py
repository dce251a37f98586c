"""The settings of distillation: the section `wrapper` of a run file. This module doesn't import torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from data_pipeline.base.config_file import LocalPath
from data_pipeline.corpus import Corpus
from pretrain.config.model_config import ModelConfig
from pretrain.config.wrappers import WrapperSettings

if TYPE_CHECKING:
    import torch
    from torch import nn


class DistillationSettings(WrapperSettings):
    """Distillation: an encoder-decoder learns from another encoder-decoder, or prefix LM from a decoder, besides the
    text (Hinton et al. 2015; Zhang et al. 2025, T5Gemma).

    At each target, the loss is (1 − w) · cross-entropy + w · T² · KL(p ‖ q), with w the weight and T the temperature. p
    and q are the softmaxes of the teacher's and the model's logits, divided by T. At an EOS token that prefix LM has
    added to a target, the loss is the cross-entropy alone if the teacher is a decoder.
    """

    name: Literal["distillation"] = "distillation"
    """The wrapper."""
    teacher: LocalPath
    """The teacher, an encoder-decoder or a decoder_only model with the corpus's tokenizer: a checkpoint, a run, or the
    output of `pretrain import`. Training doesn't change its weights."""
    weight: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Weight of the KL divergence from the teacher; cross-entropy has the rest. 1: no cross-entropy, but at EOS
    tokens that a decoder doesn't predict."""
    temperature: Annotated[PositiveFloat, Field(allow_inf_nan=False)] = 1.0
    """Divides the logits of the teacher and of the model. Above 1, unlikely tokens count for more."""
    top_k: PositiveInt | None = None
    """Keep the probabilities of the teacher's k likeliest tokens only, normalized to sum to 1. null: keep all."""

    def problems(self, model: ModelConfig, training: list[Corpus]) -> list[str]:
        from distillation import wrapper  # imports torch

        return wrapper.problems(self, model, training)

    def identity(self) -> dict[str, Any]:
        from distillation import wrapper  # imports torch

        return wrapper.identity(self)

    def load(self, precision: str, device: "torch.device") -> "Callable[[nn.Module], nn.Module]":
        from distillation import wrapper  # imports torch

        return wrapper.load(self, precision, device)
