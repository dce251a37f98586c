"""How a family converts to transformers and back: tables of names, and one mechanism that applies them."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import printable
from pretrain.models import ModelConfig, outline

Json = dict[str, Any]
State = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

_TOKEN_IDS = {"pad_id": "pad_token_id", "eos_id": "eos_token_id"}
_ALWAYS = {"vocab_size": "vocab_size", **_TOKEN_IDS, "bos_id": "bos_token_id"}
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
# What a tied output matrix is, by `tie_embeddings`.
TIED = {True: "embedding.weight", "all": "embedding.weight", "output": "decoder_embedding.weight"}
_LAYER = re.compile(r"(.+?)\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_PROBLEMS = 8


@dataclass(frozen=True)
class Exported:
    """A model in transformers' form: tensors under its names, config.json and generation_config.json (None: no file).

    `files`: names and contents of further files, such as modelling files.
    """

    tensors: State
    config: Json
    generation_config: Json | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


class Choice(NamedTuple):
    """A setting with different names for the same values: its `key` in config.json, our values with transformers', and
    `aliases`, further values of transformers with ours."""

    key: str
    values: Mapping[str, str]
    aliases: Mapping[str, str] = {}

    def to_ours(self, settings: Json) -> str:
        """Our value. Raises UserError if our model has no equivalent."""
        ours = {**{theirs: ours for ours, theirs in self.values.items()}, **self.aliases}
        if settings[self.key] not in ours:
            raise UserError(f"{self.key} is {settings[self.key]!r}, not one of {', '.join(ours)}")
        return ours[settings[self.key]]


class Encoder(NamedTuple):
    """The encoder of an encoder-decoder as a model by itself: its class in transformers, and how it is taken out."""

    class_name: str
    extract: Callable[[Exported], Exported]


# Gives the same model as weights and config that an engine's converter reads right.
Rewriting = Callable[[Mapping[str, Tensor], Any], tuple[Mapping[str, Tensor], Any]]


def within(ours: str, theirs: str, modules: Mapping[str, str]) -> dict[str, str]:
    """`modules` inside our module `ours` and transformers' `theirs`."""
    return {f"{ours}.{inner}": f"{theirs}.{their_inner}" for inner, their_inner in modules.items()}


def vocabulary_to_ours(settings: Json) -> Json:
    """Our size of the vocabulary and token ids."""
    return {ours: settings[theirs] for ours, theirs in {"vocab_size": "vocab_size", **_TOKEN_IDS}.items()}


def pad_or(settings: Json, default: int) -> Json:
    """As `vocabulary_to_ours`; `default` is the id of padding if the model has none."""
    pad = settings["pad_token_id"]
    return {**vocabulary_to_ours(settings), "pad_id": default if pad is None else pad}


@dataclass(frozen=True)
class Conversion:
    """A family, or one form of it, in transformers.

    The model:

    - `model_type` in config.json, and `class_name`. `name`: the model's name in messages; None: `model_type`.
    - `config_class`: the class of our config.
    - `encoder_decoder`: whether `decoder_start_token_id` is what the decoder starts from.
    - `remote_code`: whether the class is in files of the directory, which transformers runs only with permission.
    - `begins`, `ends`: whether the tokenizer puts bos before a text, and eos after it.
    - `generates`: whether there is a generation_config.json.

    Weights:

    - `modules`: our modules and transformers', with {} for the number of a layer; what is inside a module keeps its
      name. The output matrix is the embedding if it is tied or isn't there.
    - `fuse`, `split`: our weights in transformers' layout, still under our names, and back.
    - `unused`: a pattern of the names of tensors that our model doesn't need.
    - `copies`: names of a tied matrix, each with further names of it in a file.
    - `tidy(settings, tensors)`: tensors of a file in the form that `modules` describes.
    - `last_norm(config)`: the name of the norm whose output goes into the output matrix and nowhere else, if there is
      one.

    Settings:

    - `settings`: our settings and the keys of config.json that hold the same.
    - `choices`: our settings whose values have other names there.
    - `fixed`: keys that change what transformers computes, each with the only value that our model supports.
    - `to_theirs(config)`, `to_ours(settings, tensors)`: further keys of config.json and settings of ours. `settings`
      are those of config.json with transformers' defaults. Raises UserError for what our model doesn't support.
    - `vocabulary`: our size of the vocabulary and token ids, from the settings of config.json.
    - `also_named`: like `settings`, for messages alone.
    - `can_be`: settings of ours, each with the values that transformers' model can have; it can have all of others.
    - `needed(config.json)`: config.json without what our model doesn't use.
    - `replaced(settings)`: a key and its id, if transformers embeds this id otherwise than by its row of the matrix.

    Exports:

    - `complete`: adds what else transformers needs.
    - `encoder`: the encoder by itself, if transformers can load it.
    - `engines`: how the model is rewritten for each other engine that can run it.
    """

    model_type: str
    class_name: str
    config_class: type[ModelConfig]
    modules: Mapping[str, str]
    settings: Mapping[str, str]
    name: str | None = None
    encoder_decoder: bool = False
    remote_code: bool = False
    begins: bool = False
    ends: bool = False
    generates: bool = True
    fuse: Callable[[Mapping[str, Tensor], Any], Mapping[str, Tensor]] = lambda state, config: state
    split: Callable[[State, Any], State] = lambda state, config: state
    unused: str = r"(?!)"
    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tidy: Callable[[Json, State], State] = lambda settings, tensors: tensors
    last_norm: Callable[[Any], str | None] = lambda config: "decoder.final_norm"
    choices: Mapping[str, Choice] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    to_theirs: Callable[[Any], Json] = lambda config: {}
    to_ours: Callable[[Json, State], Json] = lambda settings, tensors: {}
    vocabulary: Callable[[Json], Json] = vocabulary_to_ours
    also_named: Mapping[str, str] = field(default_factory=dict)
    can_be: Mapping[str, tuple] = field(default_factory=dict)
    needed: Callable[[Json], Json] = lambda saved: saved
    replaced: Callable[[Json], tuple[str, int] | None] = lambda settings: None
    complete: Callable[[Exported], Exported] = lambda exported: exported
    encoder: Encoder | None = None
    engines: Mapping[str, Rewriting] = field(default_factory=dict)

    @property
    def keys(self) -> Mapping[str, str]:
        """Our settings and the keys of config.json that they come from."""
        return {**_ALWAYS, **self.settings, **self.also_named}

    def lacks(self, config: ModelConfig) -> list[str]:
        """The settings of `config` that transformers' model can't have: ["positions: rotary"]."""
        return [
            f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
            for key, values in self.can_be.items()
            if (value := getattr(config, key)) not in values
        ]

    def to_hugging_face(self, state: Mapping[str, Tensor], config: ModelConfig) -> Exported:
        """`state`: whole tensors under our names, already checked."""
        ids = to_theirs(config, _TOKEN_IDS)
        start = {"decoder_start_token_id": config.decoder_start_id} if self.encoder_decoder else {}
        saved = {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "vocab_size": config.padded_vocab_size,
            **to_theirs(config, self.settings),
            **{choice.key: choice.values[getattr(config, ours)] for ours, choice in self.choices.items()},
            **self.fixed,
            **ids,
            **self.to_theirs(config),
        }
        return self.complete(Exported(self._named(state, config), saved, {**ids, **start} if self.generates else None))

    def from_hugging_face(self, settings: Json, tensors: State, path: Path) -> tuple[ModelConfig, State]:
        """Our config, and `tensors` under our names. Raises UserError for what our model doesn't support; `path`: of
        config.json."""
        stored = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        tensors = {name: tensor for name, tensor in tensors.items() if not re.search(self.unused, name)}
        if settings.get("tie_word_embeddings", True):
            for original, copies in self.copies.items():
                drop_copies(tensors, original, copies)
        tensors = self.tidy(settings, tensors)
        config = self.config_class.model_validate(
            {
                **self.vocabulary(settings),
                **to_ours(settings, self.settings),
                **{ours: choice.to_ours(settings) for ours, choice in self.choices.items()},
                **self.to_ours(settings, tensors),
            }
        )
        if config.vocab_size is None:
            raise UserError("vocab_size is null in config.json")
        check_sizes(config.model_dump(), stored, {name: name for name in (*_SIZES, *_LAYERS)}, path)
        meta = outline(config).state_dict()
        check({name: tuple(tensor.shape) for name, tensor in self._named(meta, config).items()}, tensors)
        state = {name: tensors[self._name(name, config)] for name in self.fuse(meta, config)}
        return config, self.split(state, config)

    def _named(self, state: Mapping[str, Tensor], config: ModelConfig) -> State:
        return {self._name(name, config): tensor for name, tensor in self.fuse(state, config).items()}

    def _name(self, name: str, config: ModelConfig) -> str:
        """The name that transformers gives to one of our tensors. A tied matrix has one name, and is stored once."""
        if name == "lm_head.weight":
            name = TIED.get(getattr(config, "tie_embeddings", "lm_head" not in self.modules), name)
        number = _NUMBER.search(name)
        parts = _NUMBER.sub("{}", name, count=1).split(".")
        for end in range(len(parts), 0, -1):
            if theirs := self.modules.get(".".join(parts[:end])):
                return ".".join([theirs.format(number and number[0]), *parts[end:]])
        return name


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of the model's `state_dict()`; tied ones appear under each of their names."""
    return {name: tuple(tensor.shape) for name, tensor in outline(config).state_dict().items()}


def check(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], what: str = "the weights don't fit"
) -> None:
    """Raises UserError that names tensors that are missing, unexpected, of the wrong shape or not floating-point."""
    both = sorted(expected.keys() & tensors.keys())
    problems = [
        *(f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())),
        *(f"{printable(name)} is not of the model" for name in sorted(tensors.keys() - expected.keys())),
        *(
            f"{name} should be {expected[name]}, is {tuple(tensors[name].shape)}"
            for name in both
            if tuple(tensors[name].shape) != expected[name]
        ),
        *(
            f"{name} is of {str(tensors[name].dtype).removeprefix('torch.')}, not of floating-point numbers"
            for name in both
            if not tensors[name].is_floating_point()
        ),
    ]
    if problems:
        more = f" and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise UserError(f"{what}: {'; '.join(problems[:_MOST_PROBLEMS])}{more}")


def check_sizes(settings: Json, stored: Shapes, keys: Mapping[str, str], path: Path) -> None:
    """Raises UserError if a size in `settings`, the content of config.json at `path`, is too large for the weights.

    No width, number of heads or number of ids exceeds the largest dimension of a tensor, and layers are numbered in the
    tensors' names. `stored`: the shapes of the file's tensors. `keys`: as in `Conversion`.
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
        f"{'.'.join(key)} is {value}, but {limits[key[-1]][1]}"
        for key, value in leaves(settings)
        if key[-1] in limits and (size := _number(value)) is not None and size > limits[key[-1]][0]
    ]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")


def _number(value: Any) -> float | None:
    """A number, also one that is text, as pydantic reads it."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return math.inf if isinstance(value, int) else None


def leaves(settings: Json, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values below the sections of `settings`, and in lists, with their paths."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from leaves(value, (*above, key))
        elif isinstance(value, list):
            yield from leaves({str(number): one for number, one in enumerate(value)}, (*above, key))
        else:
            yield (*above, key), value


def in_their_names(error: ValidationError, keys: Mapping[str, str]) -> list[str]:
    """One line for each problem with our config, in which the `keys` of config.json stand for our settings."""
    lines = []
    for one in error.errors():
        message = one["msg"].removeprefix("Value error, ")
        key = ".".join(map(str, one["loc"]))
        if one["type"] != "value_error":  # the message of a validator says all
            message = f"{message[:1].lower()}{message[1:]}, got {one['input']!r}"
        line = f"{key}: {message}" if key else message
        lines.append(re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), line))
    return lines


def to_theirs(config: Section, names: Mapping[str, str]) -> Json:
    """The settings of `config` under transformers' names; `names` maps our names to transformers'."""
    return {theirs: getattr(config, ours) for ours, theirs in names.items()}


def to_ours(settings: Json, names: Mapping[str, str]) -> Json:
    """The settings in transformers' config.json under our names; `names` as in `to_theirs`."""
    return {ours: settings[theirs] for ours, theirs in names.items()}


def drop_copies(tensors: State, original: str, copies: Iterable[str]) -> None:
    """Drops the copies of the matrix `original` that a file may hold under other names.

    Raises UserError if a copy differs.
    """
    for name in [name for name in copies if name in tensors]:
        copy = tensors.pop(name)
        if not torch.equal(copy, tensors.setdefault(original, copy)):
            raise UserError(f"{name} differs from {original}, but in our model they are one matrix")
