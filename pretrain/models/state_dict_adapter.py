"""State-dict adapters: how a family's settings and tensors are called in Hugging Face transformers.

Each family has tables of names and two functions, `to_hf` and `from_hf`, which an `HFModel` holds; those functions are
made of the ones here. What is the same for all families, such as files and tokenizers, is in `pretrain.huggingface`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import printable
from pretrain.config.models import ModelConfig
from pretrain.models import FAMILIES, outline

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
_OUR_SIZES = {name: name for name in (*_SIZES, *_LAYERS)}
_LAYER = re.compile(r"(.+?)\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_PROBLEMS = 8


@dataclass(frozen=True)
class Exported:
    """A model in transformers' form: tensors under its names, config.json and generation_config.json (None: none)."""

    tensors: State
    config: Json
    generation_config: Json | None = None


class EncoderAlone(NamedTuple):
    """The encoder of an encoder-decoder as a model by itself: its class in transformers, and how it is taken out."""

    class_name: str
    extract: Callable[[Exported], Exported]


# Gives the same model as weights and config that CTranslate2's converter reads right.
Rewriting = Callable[[Mapping[str, Tensor], Any], tuple[Mapping[str, Tensor], Any]]


@dataclass(frozen=True)
class HFModel:
    """A model of transformers, which is a family of ours or one form of it.

    - `model_type` in config.json, and `class_name`. `name`: its name in messages.
    - `to_hf(config, state)`: the model in transformers' form; `state` holds whole tensors under our names.
    - `from_hf(settings, tensors)`: our config and tensors, from config.json with transformers' defaults. Both raise
      UserError for what the other side doesn't support.
    - `keys`: our settings and the keys of config.json that they come from.
    - `fixed`: keys that change what transformers computes, each with the only value that our model supports.
    - `can_be`: settings of ours, each with the values that transformers' model can have; it can have all of others.
    - `ignored`: parts of config.json, by their paths, that an import replaces: our model doesn't use them.
    - `replaced`: the path of an id that transformers embeds otherwise than by its row of the matrix.
    - `encoder_decoder`: whether `decoder_start_token_id` is what the decoder starts from.
    - `begins`, `ends`: whether the tokenizer puts bos before a text, and eos after it.
    - `last_norm(config)`: the name of the norm whose output goes into the output matrix and nowhere else, if there is
      one.
    - `code`: the modelling files of the export, which transformers runs only with permission.
    - `encoder`: the encoder by itself, if transformers can load it. `ctranslate2`: the rewriting if it runs the model.
    """

    model_type: str
    class_name: str
    to_hf: Callable[[Any, Mapping[str, Tensor]], Exported]
    from_hf: Callable[[Json, State], tuple[ModelConfig, State]]
    keys: Mapping[str, str]
    name: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    can_be: Mapping[str, tuple] = field(default_factory=dict)
    ignored: Mapping[str, Json] = field(default_factory=dict)
    replaced: str | None = None
    encoder_decoder: bool = False
    begins: bool = False
    ends: bool = False
    last_norm: Callable[[Any], str | None] = lambda config: "decoder.final_norm"
    code: tuple[str, ...] = ()
    encoder: EncoderAlone | None = None
    ctranslate2: Rewriting | None = None

    def lacks(self, config: ModelConfig) -> list[str]:
        """The settings of `config` that transformers' model can't have: ["positions: rotary"]."""
        return [
            f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
            for key, values in self.can_be.items()
            if (value := getattr(config, key)) not in values
        ]

    @property
    def all_keys(self) -> Mapping[str, str]:
        """As `keys`, with those that every model has."""
        return {**_ALWAYS, **self.keys}


def hf_models(family: str) -> Sequence[HFModel]:
    """The models of transformers that are of a family."""
    entry = FAMILIES[family]
    module = import_module(entry.adapter or entry.model.rpartition(".")[0])
    return getattr(module, "HF_MODELS", ())


# --- tensors ---


def within(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """`names` inside our module `ours` and transformers' `theirs`."""
    return {f"{ours}.{inner}": f"{theirs}.{their_inner}" for inner, their_inner in names.items()}


def tensors_of(modules: Mapping[str, str], *kinds: str) -> dict[str, str]:
    """The names of the tensors of `modules`: of "weight", "bias" or both. {} stands for the number of a layer."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in kinds or ("weight",)}


def to_hf_names(state: Mapping[str, Tensor], names: Mapping[str, str] | None, tied: str | None = None) -> State:
    """`state` under transformers' `names`; None: these are ours. `tied`: the matrix that is the output matrix too, and
    is stored once.

    Raises UserError that names the tensors for which `names` has no name: transformers would ignore them.
    """
    found = _names(state, names, tied)
    return {found[name]: tensor for name, tensor in state.items()}


def from_hf_names(
    state: Mapping[str, Tensor], tensors: State, names: Mapping[str, str] | None, tied: str | None = None
) -> State:
    """`tensors` under our names: those of `state`, whose shapes they must have. Raises UserError if they differ."""
    found = _names(state, names, tied)
    check({found[name]: tuple(tensor.shape) for name, tensor in state.items()}, tensors)
    return {name: tensors[found[name]] for name in state}


def _names(state: Iterable[str], names: Mapping[str, str] | None, tied: str | None) -> dict[str, str]:
    found, unknown = {}, []
    for name in state:
        ours = tied if tied and name == "lm_head.weight" else name
        number = _NUMBER.search(ours)
        theirs = ours if names is None else names.get(_NUMBER.sub("{}", ours, count=1))
        if theirs is None:
            unknown.append(name)
        else:
            found[name] = theirs.format(number and number[0])
    _refuse(unknown)
    return found


def _refuse(unknown: list[str]) -> None:
    if unknown:
        raise UserError(f"transformers' model has no place for {_few(unknown)}")


def drop_copies(tensors: State, copies: Mapping[str, Iterable[str]]) -> None:
    """Drops the `copies` of a matrix, by its name, that a file may hold under other names.

    Raises UserError if a copy differs.
    """
    for original, names in copies.items():
        for name in [name for name in names if name in tensors]:
            copy = tensors.pop(name)
            if not torch.equal(copy, tensors.setdefault(original, copy)):
                raise UserError(f"{name} differs from {original}, but in our model they are one matrix")


def meta_state(config: ModelConfig, tensors: Mapping[str, Tensor]) -> State:
    """The tensors of the model's `state_dict()` on the meta device; tied ones appear under each of their names.

    Raises UserError, before the model is built, if it has sizes that `tensors`, those of a file, don't have.
    """
    check_sizes(config.model_dump(), {name: tuple(tensor.shape) for name, tensor in tensors.items()}, _OUR_SIZES)
    return dict(outline(config).state_dict())


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
        raise UserError(f"{what}: {_few(problems, '; ')}")


def _few(problems: list[str], between: str = ", ") -> str:
    more = f" and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
    return f"{between.join(problems[:_MOST_PROBLEMS])}{more}"


# --- settings ---


class Choice(NamedTuple):
    """A setting with different names for the same values: its `key` in config.json, our values with transformers', and
    `aliases`, further values of transformers with ours."""

    key: str
    values: Mapping[str, str]
    aliases: Mapping[str, str] = {}

    def to_hf(self, ours: str) -> Json:
        return {self.key: self.values[ours]}

    def from_hf(self, settings: Json) -> str:
        """Our value. Raises UserError if our model has no equivalent."""
        ours = {**{theirs: ours for ours, theirs in self.values.items()}, **self.aliases}
        if settings[self.key] not in ours:
            raise UserError(f"{self.key} is {settings[self.key]!r}, not one of {', '.join(ours)}")
        return ours[settings[self.key]]


def hf_config(config: ModelConfig, model_type: str, class_name: str, *parts: Json) -> Json:
    """config.json: what all models have, and `parts`."""
    first = {"architectures": [class_name], "model_type": model_type, "vocab_size": config.padded_vocab_size}
    for part in parts:
        first |= part
    return first


def token_ids(config: ModelConfig, starts: bool = False) -> Json:
    """The ids in generation_config.json and, without that of the decoder's start, in config.json."""
    start = {"decoder_start_token_id": config.decoder_start_id} if starts else {}
    return {**to_theirs(config, _TOKEN_IDS), **start}


def vocabulary(settings: Json, pad_id: int | None = None) -> Json:
    """Our size of the vocabulary and token ids. `pad_id`: that of padding if the model has none."""
    if settings["vocab_size"] is None:
        raise UserError("vocab_size is null in config.json")
    ours = to_ours(settings, {"vocab_size": "vocab_size", **_TOKEN_IDS})
    return {**ours, "pad_id": pad_id} if ours["pad_id"] is None and pad_id is not None else ours


def to_theirs(config: Section, names: Mapping[str, str]) -> Json:
    """The settings of `config` under transformers' names; `names` maps our names to transformers'."""
    return {theirs: getattr(config, ours) for ours, theirs in names.items()}


def to_ours(settings: Json, names: Mapping[str, str]) -> Json:
    """The settings in transformers' config.json under our names; `names` as in `to_theirs`."""
    return {ours: settings[theirs] for ours, theirs in names.items()}


def check_sizes(settings: Json, stored: Shapes, keys: Mapping[str, str]) -> None:
    """Raises UserError if a size in `settings`, ours or those of config.json, is too large for the weights.

    No width, number of heads or number of ids exceeds the largest dimension of a tensor, and layers are numbered in the
    tensors' names. `stored`: the shapes of the file's tensors. `keys`: as in `HFModel`.
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
        if key[-1] in limits and _number(value) > limits[key[-1]][0]
    ]
    if problems:
        raise UserError("; ".join(problems))


def _number(value: Any) -> float:
    """The number that pydantic would read, also from text."""
    try:
        return value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        return 0


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


# --- models that transformers lacks ---

# The modules of layers that `layers.py` of the modelling files has.
_MODULES_OF_LAYERS = (
    r"(encoder|decoder)(\.layers)?\.\d+\."
    r"((self_|cross_)?attention(\.[qkvo]|\.[qk]_norm|_norm|_norm_after)|feed_forward(\.w[io]|\.wi_[01]|_norm|_norm_after))"
)
# Settings of all families that their modelling files don't have, or have under transformers' names.
_LEFT_OUT = ModelConfig.model_fields.keys() - {"dropout_rate"}


class OwnCode(NamedTuple):
    """A model that transformers lacks: the export holds its modelling files; weights and settings keep our names.

    `files`: the end of the files' names. `auto_class`: transformers' class that loads `class_name`, the model's.
    `fixed`: as in `HFModel`. `outside`: a pattern of the modules outside layers that the modelling files have.
    """

    files: str
    model_type: str
    config_class: type[ModelConfig]
    auto_class: str
    class_name: str
    fixed: Json
    outside: str

    def model(self, to_hf: Callable, from_hf: Callable, **others: Any) -> HFModel:
        """`others`: further fields."""
        code = tuple(f"{name}.py" for name in self.modules)
        return HFModel(
            self.model_type,
            self.auto_class,
            to_hf,
            from_hf,
            _OUR_SIZES,
            self.model_type,
            fixed=self.fixed,
            encoder_decoder=self.encoder_decoder,
            code=code,
            **others,
        )

    @property
    def encoder_decoder(self) -> bool:
        return "is_encoder_decoder" in self.fixed

    @property
    def modules(self) -> tuple[str, ...]:
        return f"configuration_{self.files}", f"modeling_{self.files}", "layers"

    @property
    def settings(self) -> dict[str, str]:
        config = self.config_class
        kept = config.model_fields.keys() - _LEFT_OUT - config.initial_only
        return {name: name for name in config.model_fields if name in kept}

    def to_hf(self, config: ModelConfig, state: Mapping[str, Tensor], tied: str | None) -> Exported:
        """`tied` and the error: as in `to_hf_names`."""
        known = re.compile(rf"({self.outside}|{_MODULES_OF_LAYERS})\.(weight|bias)")
        _refuse([name for name in state if not known.fullmatch(name)])
        configuration, modelling, _ = self.modules
        auto_map = {
            "AutoConfig": f"{configuration}.{self.config_class.__name__}",
            self.auto_class: f"{modelling}.{self.class_name}",
        }
        saved = hf_config(
            config,
            self.model_type,
            self.class_name,
            config.model_dump(include=set(self.settings)),
            self.fixed,
            token_ids(config),
            {"auto_map": auto_map, "tie_word_embeddings": tied is not None},
        )
        return Exported(to_hf_names(state, None, tied), saved, token_ids(config, self.encoder_decoder))

    def from_hf(self, settings: Json, tensors: State, tied: str | None, **others: Any) -> tuple[ModelConfig, State]:
        """`others`: settings of ours that differ from those in config.json."""
        if tied:
            drop_copies(tensors, {tied: ["lm_head.weight"]})
        config = self.config_class.model_validate(
            {**vocabulary(settings), **to_ours(settings, self.settings), **others}
        )
        return config, from_hf_names(meta_state(config, tensors), tensors, None, tied)
