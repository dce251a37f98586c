"""Settings of layers with rotary positions in transformers' config.json: heads, windows and rotations."""

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.conversion import Json, to_theirs
from pretrain.models.config.blocks import Heads, LocalAndGlobal

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
HEADS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "d_kv": "head_dim",
}
KEYS = {**HEADS, "num_key_value_heads": HEADS["kv_heads"], "num_layers": "num_hidden_layers"}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
UNUSED_WINDOW = 4096


def heads_to_theirs(config: Heads, model: str) -> Json:
    """`model`: its name in transformers, for the UserError that its heads can't have such a width."""
    if config.d_model % config.num_heads:
        raise UserError(f"transformers has no {model} whose num_heads doesn't divide d_model")
    return to_theirs(config, HEADS)


def heads_to_ours(saved: Json) -> Json:
    """Our settings of heads; those that are as by default are None."""
    width, heads, kv_heads, d_kv = (saved[HEADS[name]] for name in ("d_model", "num_heads", "kv_heads", "d_kv"))
    return {
        "d_model": width,
        "d_ff": saved["intermediate_size"],
        "num_heads": heads,
        "num_key_value_heads": None if kv_heads == heads else kv_heads,
        "head_dim": None if d_kv * heads == width else d_kv,
    }


def scalar_to_ours(saved: Json) -> Json:
    """For models that have the setting: in others transformers ignores it."""
    scalar, d_kv = saved["query_pre_attn_scalar"], saved["head_dim"]
    return {"query_pre_attn_scalar": None if scalar == d_kv else scalar}


def layer_types(config: LocalAndGlobal, num_layers: int) -> list[str]:
    return [GLOBAL if config.sees_all(layer) else LOCAL for layer in range(num_layers)]


def windows_to_theirs(config: LocalAndGlobal, num_layers: int) -> Json:
    """transformers makes the mask of a window even if no layer has one, which takes a number.

    Raises UserError for a window of one token: transformers' cache would show all tokens instead.
    """
    if config.sliding_window == 1:
        raise UserError(
            "transformers can't generate with sliding_window: 1: its cache holds windows of 2 tokens or more"
        )
    return {"layer_types": layer_types(config, num_layers), "sliding_window": config.sliding_window or UNUSED_WINDOW}


def windows_to_ours(saved: Json) -> Json:
    """Raises UserError unless every n-th layer has full attention, and only these."""
    types, window = saved["layer_types"], saved["sliding_window"]
    every = types.index(GLOBAL) + 1 if GLOBAL in types else None
    if LOCAL not in types:
        return {"sliding_window": None, "full_attention_every": None}
    found = LocalAndGlobal(sliding_window=window, full_attention_every=every)
    if types != layer_types(found, len(types)):
        raise UserError(f"layer_types: our models have {GLOBAL} in every n-th layer and {LOCAL} in the others")
    return {"sliding_window": window, "full_attention_every": every}


def rotations_to_theirs(config: LocalAndGlobal, two_bases: bool = False) -> Json:
    """`two_bases`: for models whose layers with a window have a base of their own."""

    def rotation(base: float) -> Json:
        return {"rope_type": "default", "rope_theta": base}

    if not two_bases:
        return {"rope_parameters": rotation(config.rope_base)}
    local = config.window_rope_base or config.rope_base
    return {"rope_parameters": {GLOBAL: rotation(config.rope_base), LOCAL: rotation(local)}}


def rotations_to_ours(parameters: Json) -> float:
    """The base. Raises UserError for rotations that grow with the row otherwise than by position."""
    if parameters["rope_type"] != "default":
        raise UserError(
            f"rope_parameters: rope_type is {parameters['rope_type']!r}, but our models have 'default' only"
        )
    return parameters["rope_theta"]


def windows_and_rotations_to_ours(saved: Json) -> Json:
    """As `windows_to_ours`, with both bases."""
    windows = windows_to_ours(saved)
    local, whole = (rotations_to_ours(saved["rope_parameters"][kind]) for kind in (LOCAL, GLOBAL))
    differs = windows["sliding_window"] is not None and local != whole
    return {**windows, "rope_base": whole, "window_rope_base": local if differs else None}
