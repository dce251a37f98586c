"""The settings of wrappers: the section `wrapper` of a run file. This module doesn't import torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from data_pipeline.base.config_file import Section
from data_pipeline.base.packages import named

if TYPE_CHECKING:
    import torch
    from torch import nn

    from data_pipeline.corpus import Corpus
    from pretrain.config.model_config import ModelConfig


class WrapperSettings(Section):
    """A wrapper of an installed package, with its own keys: a module around the model that has the losses of training.

    The launcher reads these settings too, so a subclass imports torch in its methods.
    """

    name: str
    """The wrapper's name."""

    def problems(self, model: "ModelConfig", training: "list[Corpus]") -> list[str]:
        """Why a run of `model` on these corpora can't have the wrapper, one line for each reason. A corpus is listed
        once for each objective of the run."""
        return []

    def identity(self) -> dict[str, Any]:
        """The settings that may not change over the life of a run, as JSON has them. A key KEY_sha256 stands for the
        content of what KEY names."""
        return self.model_dump(mode="json")

    def load(self, precision: str, device: "torch.device") -> "Callable[[nn.Module], nn.Module]":
        """Returns a function that wraps the model, or DeepSpeed's engine around it. All ranks call this together.

        The module's forward pass takes a micro-batch and returns losses, each (batch, targets). Only "labels" has a
        gradient; `train/NAME` is the mean of any other. Raises FailedError if a file is damaged.
        """
        raise NotImplementedError


def offered_wrapper(values: object) -> object:
    """The wrapper that `values`, a section's keys, name. Raises ValueError if no installed package has it."""
    return (
        named(values, "name", "wrappers", WrapperSettings).model_validate(values)
        if isinstance(values, dict)
        else values
    )
