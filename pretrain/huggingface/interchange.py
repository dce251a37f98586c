"""What a family says of its form in transformers, and the checks that all families share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.json_files import Json
from pretrain.models import ModelConfig, build

State = dict[str, Tensor]


@dataclass(frozen=True)
class Exported:
    """A model as transformers has it: `tensors` by its names, config.json, generation_config.json (None: no such file).

    `files`: name and content of others, as a modelling file.
    """

    tensors: State
    config: Json
    generation_config: Json | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Interchange:
    """A family in transformers: its `model_type` in config.json, its class, and the way there and back.

    `to_hugging_face(state_dict, config)`: our names and whole tensors, checked already. `from_hugging_face(config.json,
    tensors)`: config and weights under our names; raises UserError for what our model can't say. That config.json has
    all settings, as transformers reads them.
    `fixed`: settings that change what transformers computes, each with the value that our model stands for.
    `encoder_decoder`: whether `decoder_start_token_id` says what a decoder starts from.
    `remote_code`: whether that class is in files that the directory carries, which transformers asks leave to run.
    `begins`, `ends`: whether a text as the model reads it stands between bos and eos, which the tokenizer puts there.
    """

    model_type: str
    class_name: str
    to_hugging_face: Callable[[Mapping[str, Tensor], Any], Exported]
    from_hugging_face: Callable[[Json, State], tuple[ModelConfig, State]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    encoder_decoder: bool = False
    begins: bool = False
    ends: bool = False
    remote_code: bool = False

    @property
    def usage(self) -> str:
        """How transformers loads the directory."""
        leave = ", both with trust_remote_code=True" if self.remote_code else ""
        return f"{self.class_name}.from_pretrained and AutoTokenizer.from_pretrained load it{leave}"


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of all tensors of the model's `state_dict()`, tied ones under each of their names."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in build(config).state_dict().items()}


def check(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], what: str = "the weights don't fit"
) -> None:
    """Raises UserError that names tensors that are missing, not of the model, misshapen or not of floats."""
    problems = [
        *(f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())),
        *(f"{name} is not of the model" for name in sorted(tensors.keys() - expected.keys())),
        *(
            f"{name} should be {shape}, is {tuple(tensors[name].shape)}"
            for name, shape in sorted(expected.items())
            if name in tensors and tuple(tensors[name].shape) != shape
        ),
        *(
            f"{name} is of {str(tensors[name].dtype).removeprefix('torch.')}, not of floating-point numbers"
            for name in sorted(expected.keys() & tensors.keys())
            if not tensors[name].is_floating_point()
        ),
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(f"{what}: {'; '.join(problems[:_SHOWN])}{more}")


_SHOWN = 8


def renamed(tensors: State, config: ModelConfig, theirs: Callable[[str], str]) -> State:
    """The weights of the model of `config` under our names; `theirs` gives transformers' name for one of ours.

    Raises UserError that names, as transformers does, what is missing, left over or of another shape.
    """
    ours = shapes(config)
    check({theirs(name): shape for name, shape in ours.items()}, tensors)
    return {name: tensors[theirs(name)] for name in ours}


def one_of(settings: Json, key: str, ours: Mapping[str, str]) -> str:
    """Our word for the setting `key`. Raises UserError where our model has nothing like it."""
    if settings[key] not in ours:
        raise UserError(f"{key} is {settings[key]!r}, not one of {', '.join(ours)}")
    return ours[settings[key]]


def drop_copies(tensors: State, original: str, copies: Iterable[str]) -> None:
    """Keeps, of one matrix that a file may hold under several names, the one called `original`.

    Raises UserError where two of them differ.
    """
    for name in [name for name in copies if name in tensors]:
        copy = tensors.pop(name)
        if not torch.equal(copy, tensors.setdefault(original, copy)):
            raise UserError(f"{name} is not the same matrix as {original}, as it is in our model")
