"""Checks of config.json against the weights, before anything is built, and messages in its names."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from data_pipeline.foundation.errors import UserError
from pretrain.models.state_dict_adapter import Json, Shapes

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


def check_sizes(settings: Json, stored: Shapes, keys: Mapping[str, str] | None) -> None:
    """Raises UserError if a size in `settings`, ours or those of config.json, is too large for the weights.

    No width, number of heads or number of ids exceeds the largest dimension of a tensor, and layers are numbered in the
    tensors' names. `stored`: the shapes of the file's tensors. `keys`: the
    key of each setting; None: its name.
    """
    numbered = defaultdict(set)
    for name in stored:
        if layer := _LAYER.match(name):
            numbered[layer[1]].add(layer[2])
    layers = max(map(len, numbered.values()), default=0)
    largest = max((size for shape in stored.values() if 0 not in shape for size in shape), default=0)
    of_sizes = largest, f"the largest dimension of the weights is {largest}"
    of_layers = layers, f"there are weights of {layers} layers"
    ours = {**dict.fromkeys(_SIZES, of_sizes), **dict.fromkeys(_LAYERS, of_layers)}
    limits = ours if keys is None else {keys[name]: limit for name, limit in ours.items() if name in keys}
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
