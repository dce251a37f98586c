"""A family's description of its form in transformers, and the checks that all families share."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.json_files import Json
from pretrain.models import ModelConfig, outline

State = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

_ALWAYS = {"vocab_size": "vocab_size", "pad_id": "pad_token_id", "eos_id": "eos_token_id", "bos_id": "bos_token_id"}
# Our settings that are a dimension of a tensor or divide one, and those that count layers.
_SIZES = (
    "vocab_size",
    "d_model",
    "d_ff",
    "d_kv",
    "head_dim",
    "num_heads",
    "num_key_value_heads",
    "num_cross_heads",
    "num_token_types",
    "max_positions",
    "relative_attention_num_buckets",
)
_LAYERS = ("num_layers", "num_encoder_layers", "num_decoder_layers")
_LAYER = re.compile(r"(.+?)\.(\d+)\.")


@dataclass(frozen=True)
class Exported:
    """A model in transformers' form: tensors under its names, config.json and generation_config.json (None: no file).

    `files`: names and contents of further files, such as modelling files.
    """

    tensors: State
    config: Json
    generation_config: Json | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoder:
    """The encoder of an encoder-decoder as a model by itself: its class in transformers, and what is left of the
    whole model's form."""

    class_name: str
    of: Callable[[Exported], Exported]


# Gives the same model as weights and config that an engine's converter reads right.
Rewriting = Callable[[Mapping[str, Tensor], Any], tuple[Mapping[str, Tensor], Any]]


@dataclass(frozen=True)
class Interchange:
    """A family in transformers: its `model_type` in config.json, its class, and the conversions in both directions.

    - `to_hugging_face(state_dict, config)`: takes our names and whole tensors, already checked.
    - `from_hugging_face(config.json, tensors)`: returns config and weights under our names. config.json has all
      settings, as transformers reads them. Raises UserError for what our model doesn't support.
    - `names`: our settings and the keys of config.json that they come from. Errors name the latter.
    - `name`: the model's name in messages; None: `model_type`.
    - `can_be`: settings of ours, each with the values that transformers' model can have; it can have all of others.
    - `fixed`: settings that change what transformers computes, each with the only value that our model supports.
    - `used(config.json)`: config.json without what our model doesn't use.
    - `unlike(config.json)`: a key and its id, if transformers embeds it otherwise than by its row of the matrix.
    - `encoder_decoder`: whether `decoder_start_token_id` is what the decoder starts from.
    - `remote_code`: whether the class is in files of the directory, which transformers runs only with permission.
    - `last_norm(config)`: the name of the norm whose output goes into the output matrix and nowhere else, if there is
      one.
    - `begins`, `ends`: whether the tokenizer puts bos before a text, and eos after it.
    - `encoder`: the encoder alone, if transformers can load it.
    - `engines`: how the model is rewritten for each other engine that can run it.
    """

    model_type: str
    class_name: str
    to_hugging_face: Callable[[Mapping[str, Tensor], Any], Exported]
    from_hugging_face: Callable[[Json, State], tuple[ModelConfig, State]]
    names: Mapping[str, str]
    name: str | None = None
    can_be: Mapping[str, tuple] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    used: Callable[[Json], Json] = lambda saved: saved
    unlike: Callable[[Json], tuple[str, int] | None] = lambda settings: None
    encoder_decoder: bool = False
    begins: bool = False
    ends: bool = False
    remote_code: bool = False
    encoder: Encoder | None = None
    engines: Mapping[str, Rewriting] = field(default_factory=dict)
    last_norm: Callable[[Any], str | None] | None = None

    @property
    def keys(self) -> Mapping[str, str]:
        """Our settings and the keys of config.json that they come from."""
        return {**_ALWAYS, **self.names}

    def lacks(self, config: ModelConfig) -> list[str]:
        """The settings of `config` that transformers' model can't have: ["positions: rotary"]."""
        return [
            f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
            for key, values in self.can_be.items()
            if (value := getattr(config, key)) not in values
        ]

    def usage(self, encoder_only: bool = False) -> str:
        """How to load the directory in transformers."""
        name = self.encoder.class_name if encoder_only and self.encoder else self.class_name
        permission = ", both with trust_remote_code=True" if self.remote_code else ""
        return f"{name}.from_pretrained and AutoTokenizer.from_pretrained load it{permission}"


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of the model's `state_dict()`; tied ones appear under each of their names."""
    return {name: tuple(tensor.shape) for name, tensor in outline(config).state_dict().items()}


def check(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], what: str = "the weights don't fit"
) -> None:
    """Raises UserError that names tensors that are missing, unexpected, of the wrong shape or not floating-point."""
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


def check_sizes(settings: Json, stored: Shapes, keys: Mapping[str, str], path: Path) -> None:
    """Raises UserError if a size in `settings`, the content of config.json at `path`, is too large for the weights.

    No width, number of heads or number of ids exceeds the largest dimension of a tensor, and layers are numbered in the
    tensors' names. `stored`: the shapes of the file's tensors. `keys`: as in `Interchange`.
    """
    numbered = defaultdict(set)
    for name in stored:
        if layer := _LAYER.match(name):
            numbered[layer[1]].add(layer[2])
    layers = max(map(len, numbered.values()), default=0)
    largest = max((size for shape in stored.values() if 0 not in shape for size in shape), default=0)
    limits = {
        keys[ours]: (largest, f"the largest dimension of the weights is {largest}") for ours in _SIZES if ours in keys
    }
    limits |= {keys[ours]: (layers, f"there are weights of {layers} layers") for ours in _LAYERS if ours in keys}
    problems = [
        f"{'.'.join(place)} is {value}, but {limits[place[-1]][1]}"
        for place, value in _leaves(settings)
        if place[-1] in limits and isinstance(value, int | float) and value > limits[place[-1]][0]
    ]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")


def _leaves(settings: Json, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def in_their_names(error: ValidationError, keys: Mapping[str, str]) -> list[str]:
    """One line for each problem with our config, in which the `keys` of config.json stand for our settings."""
    lines = []
    for one in error.errors():
        message = one["msg"].removeprefix("Value error, ")
        place = ".".join(map(str, one["loc"]))
        if one["type"] != "value_error":  # the message of a validator says all
            message = f"{message[:1].lower()}{message[1:]}, got {one['input']!r}"
        line = f"{place}: {message}" if place else message
        lines.append(re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), line))
    return lines


def renamed(tensors: State, config: ModelConfig, theirs: Callable[[str], str]) -> State:
    """The weights of the model of `config` under our names; `theirs` maps one of our names to transformers'.

    Raises UserError that lists, under transformers' names, tensors that are missing, unexpected or of another shape.
    """
    ours = shapes(config)
    check({theirs(name): shape for name, shape in ours.items()}, tensors)
    return {name: tensors[theirs(name)] for name in ours}


def to_theirs(config: Section, names: Mapping[str, str]) -> Json:
    """The settings of `config` under transformers' names; `names` maps our names to transformers'."""
    return {theirs: getattr(config, ours) for ours, theirs in names.items()}


def to_ours(settings: Json, names: Mapping[str, str]) -> Json:
    """The settings in transformers' config.json under our names; `names` as in `to_theirs`."""
    return {ours: settings[theirs] for ours, theirs in names.items()}


def one_of(settings: Json, key: str, ours: Mapping[str, str]) -> str:
    """Our value for the setting `key`. Raises UserError if our model has no equivalent."""
    if settings[key] not in ours:
        raise UserError(f"{key} is {settings[key]!r}, not one of {', '.join(ours)}")
    return ours[settings[key]]


def drop_copies(tensors: State, original: str, copies: Iterable[str]) -> None:
    """Drops the copies of the matrix `original` that a file may hold under other names.

    Raises UserError if a copy differs.
    """
    for name in [name for name in copies if name in tensors]:
        copy = tensors.pop(name)
        if not torch.equal(copy, tensors.setdefault(original, copy)):
            raise UserError(f"{name} differs from {original}, but in our model they are one matrix")
