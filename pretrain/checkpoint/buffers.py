"""buffers.safetensors: what a model computes with and doesn't train, such as an imported BART's final_logits_bias.

Only buffers that aren't all zeros are written, and most checkpoints have no such file.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.safetensors_file import os_errors

BUFFERS = "buffers.safetensors"


def model_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of `model.state_dict()`, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}


def write_buffers(buffers: Mapping[str, Tensor], directory: Path) -> None:
    """Writes the buffers that aren't all zeros, in fp32."""
    found = {name: buffer.float().cpu().contiguous() for name, buffer in buffers.items() if buffer.any()}
    if found:
        with os_errors():
            save_file(found, directory / BUFFERS)


def read_buffers(directory: Path) -> dict[str, Tensor]:
    """The buffers in a checkpoint. Raises FailedError if their file is damaged."""
    path = directory / BUFFERS
    if not path.exists():
        return {}
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise FailedError(f"{path}: damaged: {error}") from None


def load_buffers(model: nn.Module, directory: Path) -> None:
    """Loads a checkpoint's buffers into `model`. Raises FailedError if the model has others."""
    own = model_buffers(model)
    for name, values in read_buffers(directory).items():
        if name not in own or own[name].shape != values.shape:
            raise FailedError(f"{directory / BUFFERS}: not of this model: {name} {tuple(values.shape)}")
        with torch.no_grad():
            own[name].copy_(values)
