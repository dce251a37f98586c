"""State-dict adapters: translate a family's settings and tensors to and from Hugging Face transformers.

Each family has an `HFModel`: tables of names, and functions for what needs more than renaming. `pretrain.export` has
what all families share, such as files and tokenizers.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from data_pipeline.base.config_file import Section
from data_pipeline.base.errors import UserError
from pretrain.config.model_config import ModelConfig
from pretrain.models import FAMILIES, meta_model
from pretrain.models.model import Model

Json = dict[str, Any]
State = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

TOKEN_IDS = {"pad_id": "pad_token_id", "eos_id": "eos_token_id"}
OUTPUT = "lm_head.weight"
_MOST_PROBLEMS = 8
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Exported:
    """A model in transformers' form: tensors, config.json and generation_config.json (None: no such file)."""

    tensors: State
    config: Json
    generation_config: Json | None = None


class Choice(NamedTuple):
    """A setting whose values transformers names differently.

    Attributes:
        key: the key in config.json.
        values: transformers' value for each of our values.
        aliases: our value for further values of transformers.
    """

    key: str
    values: Mapping[str, str]
    aliases: Mapping[str, str] = {}

    def from_hf(self, theirs: str) -> str:
        """Our value. Raises UserError if our model has no equivalent."""
        ours = {**{theirs: ours for ours, theirs in self.values.items()}, **self.aliases}
        if theirs not in ours:
            raise UserError(f"{self.key} is {theirs!r}, not one of {', '.join(ours)}")
        return ours[theirs]


Settings = Mapping[str, str | Choice]  # our settings, with their keys in config.json


@dataclass(frozen=True, kw_only=True)
class HFModel:
    """A model of transformers that a family of ours, or a form of it, is exported to and imported from.

    Attributes:
        config_class: the class of our family's settings.
        model_type: the value of `model_type` in config.json.
        class_name: the class in transformers.
        name: the model's name in messages.
        settings: our settings that are only renamed.
        names: transformers' name of each of our tensors, with {} for the number of a layer. None: the names are equal.
        config_to_hf: makes the other keys of config.json from our config. Raises UserError for what transformers lacks.
        config_from_hf: makes our other settings from config.json, with transformers' defaults, and drops the tensors
            that our model doesn't use. Raises UserError for what our model lacks.
        keys: further settings of ours, with the keys that they come from.
        copies: transformers' names of matrices, with the names under which a file may hold them again.
        fixed: keys that change what transformers computes, each with the only value that our model supports.
        can_be: settings of ours, each with the values that transformers' model can have. Default: all values.
        tensors_to_hf: gives our tensors transformers' shapes. `tensors_from_hf` is its inverse.
        unused: the shapes of tensors that transformers has for a config.json and our model lacks: zeros in an export.
        ignored: sections of config.json, by their paths, that our model doesn't use, with what replaces them at an
            import.
        as_saved: keys whose values count as they are in config.json, where transformers would replace them.
            Keys that the file lacks are None.
        begins: True if the tokenizer puts BOS before a text.
        ends: True if the tokenizer puts EOS after a text.
        last_norm: the name of the norm whose output goes into the output matrix alone. None: there is no such norm.
        code: the export's modelling files, which transformers runs only with permission: names of files that ship,
            paths of others.
    """

    config_class: type[ModelConfig]
    model_type: str
    class_name: str
    name: str
    settings: Settings
    names: Mapping[str, str] | None
    config_to_hf: Callable[[Any], Json]
    config_from_hf: Callable[[Json, State], Json]
    keys: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Iterable[str]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    can_be: Mapping[str, tuple] = field(default_factory=dict)
    tensors_to_hf: Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda config, state: state
    tensors_from_hf: Callable[[Any, State], State] = lambda config, state: state
    unused: Callable[[Json], Shapes] = lambda saved: {}
    ignored: Mapping[str, Json] = field(default_factory=dict)
    as_saved: tuple[str, ...] = ()
    begins: bool = False
    ends: bool = False
    last_norm: Callable[[Any], str | None] = lambda config: "decoder.final_norm"
    code: tuple[str | Path, ...] = ()

    @property
    def encoder_decoder(self) -> bool:
        return "is_encoder_decoder" in self.fixed

    @property
    def all_keys(self) -> Mapping[str, str]:
        """Our settings and the keys of config.json that they come from."""
        renamed = {ours: key if isinstance(key, str) else key.key for ours, key in self.settings.items()}
        return {"vocab_size": "vocab_size", **TOKEN_IDS, "bos_id": "bos_token_id", **renamed, **self.keys}


def lacks(can_be: Mapping[str, tuple], config: ModelConfig) -> list[str]:
    """The settings of `config` whose values aren't among those in `can_be`: ["positions: rotary"]."""
    return [
        f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
        for key, values in can_be.items()
        if (value := getattr(config, key)) not in values
    ]


def hf_models(family: str) -> Sequence[HFModel]:
    """The models of transformers that a family is exported to."""
    return getattr(import_module(FAMILIES[family].model.rpartition(".")[0]), "HF_MODELS", ())


# --- tensors ---


def within(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """`names` with the prefixes `ours` and `theirs`."""
    return {f"{ours}.{inner}": f"{theirs}.{their_inner}" for inner, their_inner in names.items()}


def tensors_of(modules: Mapping[str, str], *kinds: str) -> dict[str, str]:
    """The names of the tensors of `modules`, of each of the `kinds` "weight" and "bias"; default: "weight"."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in kinds or ("weight",)}


def tied(model: Model) -> str | None:
    """The name of the matrix that is tied to the output matrix; None: no matrix."""
    named = dict(model.named_parameters(remove_duplicate=False))
    output = named.pop(OUTPUT)
    return next((name for name, parameter in named.items() if parameter is output), None)


def tensor_names(hf: HFModel, state: Iterable[str], tied: str | None) -> dict[str, str]:
    """Transformers' name of each tensor. An output matrix tied to the matrix `tied` has that matrix's name. Raises
    UserError if there are tensors for which transformers has no name."""
    found: dict[str, str | None] = {}
    for name in state:
        ours = tied if tied and name == OUTPUT else name
        number = _NUMBER.search(ours)
        theirs = ours if hf.names is None else hf.names.get(_NUMBER.sub("{}", ours, count=1))
        found[name] = theirs and theirs.format(number and number[0])
    if unknown := [name for name, theirs in found.items() if theirs is None]:
        raise UserError(f"transformers' model has no place for {few(unknown)}")
    return {name: theirs for name, theirs in found.items() if theirs}


def drop_copies(tensors: State, copies: Mapping[str, Iterable[str]]) -> None:
    """Drops the `copies` of each matrix. Raises UserError if a copy differs."""
    for original, names in copies.items():
        for name in [name for name in names if name in tensors]:
            copy = tensors.pop(name)
            if not torch.equal(copy, tensors.setdefault(original, copy)):
                raise UserError(f"{name} differs from {original}, but in our model they are one matrix")


def drop_tensors(tensors: State, unused: Callable[[str], object]) -> None:
    """Drops the tensors whose names are `unused`."""
    for name in filter(unused, list(tensors)):
        del tensors[name]


def few(problems: list[str], between: str = ", ") -> str:
    more = f" and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
    return f"{between.join(problems[:_MOST_PROBLEMS])}{more}"


# --- settings ---


def vocabulary(settings: Json, pad_id: int | None = None) -> Json:
    """Our vocabulary size and token ids. `pad_id`: the id of padding if the model has none."""
    if settings["vocab_size"] is None:
        raise UserError("vocab_size is null in config.json")
    ours = to_ours(settings, {"vocab_size": "vocab_size", **TOKEN_IDS})
    return {**ours, "pad_id": pad_id} if ours["pad_id"] is None and pad_id is not None else ours


def to_theirs(config: Section, names: Settings) -> Json:
    """The settings of `config` under transformers' names."""
    found: Json = {}
    for ours, key in names.items():
        value = getattr(config, ours)
        if isinstance(key, Choice):
            found[key.key] = key.values[value]
        else:
            found[key] = value.model_dump() if isinstance(value, Section) else value
    return found


def to_ours(settings: Json, names: Settings) -> Json:
    """The settings in transformers' config.json under our names. Raises UserError for choices that we don't have."""
    return {
        ours: key.from_hf(settings[key.key]) if isinstance(key, Choice) else settings[key]
        for ours, key in names.items()
    }


def refuse_others(settings: Json, fixed: Mapping[str, Any], where: str = "") -> None:
    """Raises UserError for settings that differ from `fixed`: with them our model would compute something else."""
    if problems := [
        f"{key} is {settings[key]!r}, but must be {ours!r}"
        for key, ours in fixed.items()
        if settings.get(key, ours) != ours
    ]:
        raise UserError(f"{where}our models don't support these settings: {'; '.join(problems)}")


def in_their_names(error: ValidationError, keys: Mapping[str, str]) -> list[str]:
    """One line for each problem with our config. The lines name our settings by their `keys` in config.json."""
    lines = []
    for one in error.errors():
        message = one["msg"].removeprefix("Value error, ")
        key = ".".join(map(str, one["loc"]))
        if one["type"] != "value_error":  # a validator's own message is complete
            message = f"{message[:1].lower()}{message[1:]}, got {one['input']!r}"
        line = f"{key}: {message}" if key else message
        lines.append(re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), line))
    return lines


# --- models that transformers lacks ---

# Settings of all families that modelling files don't have, or have under transformers' names.
_LEFT_OUT = ModelConfig.model_fields.keys() - {"dropout_rate"}


def own_code(
    config_class: type[ModelConfig],
    file: str | Path,
    model_type: str,
    auto_class: str,
    class_name: str,
    **others: Any,
) -> HFModel:
    """A model that transformers lacks: the export holds its modelling files; weights and settings keep our names.

    `file`: the end of the name of the model's file among those that ship, or the path of a package's file, which has
    the config too and may import from `.configuration` and `.layers`. `auto_class`: transformers' class that loads the
    model's, `class_name`. `others`: further fields.
    """
    modelling = file if isinstance(file, Path) else Path(f"modeling_{file}.py")
    configuration = modelling.stem if isinstance(file, Path) else "configuration"
    auto_map = {
        "AutoConfig": f"{configuration}.{config_class.__name__}",
        auto_class: f"{modelling.stem}.{class_name}",
    }
    settings = [name for name in config_class.model_fields if name not in _LEFT_OUT | config_class.initial_only]

    def config_to_hf(config: ModelConfig) -> Json:
        one_matrix = tied(meta_model(config)) is not None
        return {"architectures": [class_name], "auto_map": auto_map, "tie_word_embeddings": one_matrix}

    return HFModel(
        config_class=config_class,
        model_type=model_type,
        class_name=auto_class,
        name=model_type,
        settings={name: name for name in settings},
        names=None,
        **{"config_to_hf": config_to_hf, "config_from_hf": lambda saved, tensors: vocabulary(saved), **others},
        code=("configuration.py", modelling, "layers.py"),
    )
