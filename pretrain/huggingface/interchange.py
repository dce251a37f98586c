"""What a family says of its form in transformers, and the checks that all families share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data_pipeline.errors import UserError
from pretrain.models import ModelConfig, build

Json = dict[str, Any]
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
    tensors)`: config and weights under our names; raises UserError for what our model can't say.
    `remote_code`: whether that class is in files that the directory carries, which transformers asks leave to run.
    `begins`, `ends`: whether a text as the model reads it stands between bos and eos, which the tokenizer puts there.
    """

    model_type: str
    class_name: str
    to_hugging_face: Callable[[Mapping[str, Tensor], Any], Exported]
    from_hugging_face: Callable[[Json, State], tuple[ModelConfig, State]]
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
    """Raises UserError that names tensors that are missing, not of the model, or of another shape."""
    problems = [
        *(f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())),
        *(f"{name} is not of the model" for name in sorted(tensors.keys() - expected.keys())),
        *(
            f"{name} should be {shape}, is {tuple(tensors[name].shape)}"
            for name, shape in sorted(expected.items())
            if name in tensors and tuple(tensors[name].shape) != shape
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


def drop_copies(tensors: State, original: str, copies: Iterable[str]) -> None:
    """Removes the `copies` that old files hold of the tensor `original`. Raises UserError where one is another."""
    for name in copies:
        copy = tensors.pop(name, None)
        if copy is not None and original in tensors and not torch.equal(copy, tensors[original]):
            raise UserError(f"{name} is not the same matrix as {original}, as it is in our model")
