"""Settings of heads, sliding windows and RoPE under transformers' names: for decoder-only models and both T5Gemmas."""

from dataclasses import dataclass

from data_pipeline.base.errors import UserError
from pretrain.config.model_config import Heads, LocalAndGlobal, Rotation
from pretrain.models.state_dict_adapter import Json, to_theirs

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


@dataclass(frozen=True)
class RotarySettings:
    """Translates the settings of heads, sliding windows and RoPE between our models and one of transformers.

    Attributes:
        windows: True if layers may have a sliding window.
        two_bases: True if layers with a window have a RoPE base of their own.
        scalar: True if the model uses `query_pre_attn_scalar`; other models ignore it.
    """

    windows: bool = True
    two_bases: bool = False
    scalar: bool = True

    def to_theirs(self, config: LocalAndGlobal, stack: Heads, num_layers: int) -> Json:
        """The keys of config.json. Raises UserError for a width of heads that transformers' model can't have, and for a
        window of one token, with which transformers' cache would attend to all tokens."""
        if stack.d_model % stack.num_heads:
            raise UserError(f"num_heads: {stack.num_heads} must divide d_model {stack.d_model} in transformers")
        theirs = to_theirs(stack, HEADS)
        rotation = _rotation_to_theirs(config.rotation)
        # transformers 4 reads bases and scaling beside `rope_parameters`, and takes its defaults where it finds none
        theirs |= {"rope_parameters": rotation, "rope_theta": config.rope_base}
        if config.rope_factor != 1.0:
            theirs["rope_scaling"] = {"rope_type": "linear", "factor": config.rope_factor}
        if self.two_bases:
            local = Rotation(config.window_rope_base) if config.window_rope_base else config.rotation
            theirs["rope_parameters"] = {GLOBAL: rotation, LOCAL: _rotation_to_theirs(local)}
            theirs["rope_local_base_freq"] = local.base
        if self.windows:
            if config.sliding_window == 1:
                raise UserError("transformers can't generate with sliding_window: 1: its cache holds 2 tokens or more")
            # transformers makes the mask of a window, for which it needs a number, even if no layer has one
            theirs["sliding_window"] = config.sliding_window or UNUSED_WINDOW
            theirs["layer_types"] = layer_types(config, num_layers)
        if self.scalar:
            theirs["query_pre_attn_scalar"] = stack.attention_scalar
        return theirs

    def to_ours(self, saved: Json) -> Json:
        """Our settings. Raises UserError for windows and kinds of RoPE that our models don't have."""
        ours = {**self.heads_to_ours(saved), **(windows_to_ours(saved) if self.windows else {})}
        if not self.two_bases:
            return {**ours, **rotation_to_ours(saved["rope_parameters"])}
        local, whole = (rotation_to_ours(saved["rope_parameters"][kind]) for kind in (LOCAL, GLOBAL))
        differs = ours["sliding_window"] is not None and local != whole
        if differs and local["rope_factor"] != 1.0:
            raise UserError(f"rope_parameters: {LOCAL} is scaled by itself; our layers with a window aren't")
        return {**ours, **whole, "window_rope_base": local["rope_base"] if differs else None}

    def heads_to_ours(self, saved: Json) -> Json:
        """Our settings of heads; None for default values."""
        width, heads, kv_heads, d_kv = (saved[HEADS[name]] for name in ("d_model", "num_heads", "kv_heads", "d_kv"))
        ours = {
            "d_model": width,
            "d_ff": saved["intermediate_size"],
            "num_heads": heads,
            "num_key_value_heads": None if kv_heads == heads else kv_heads,
            "head_dim": None if d_kv * heads == width else d_kv,
        }
        if self.scalar:
            scalar = saved["query_pre_attn_scalar"]
            ours["query_pre_attn_scalar"] = None if scalar == d_kv else scalar
        return ours


def layer_types(config: LocalAndGlobal, num_layers: int) -> list[str]:
    return [GLOBAL if config.has_full_attention(layer) else LOCAL for layer in range(num_layers)]


def windows_to_ours(saved: Json) -> Json:
    """Our settings of windows. Raises UserError unless exactly every n-th layer has full attention."""
    types, window = saved["layer_types"], saved["sliding_window"]
    every = types.index(GLOBAL) + 1 if GLOBAL in types else None
    if LOCAL not in types:
        return {"sliding_window": None, "full_attention_every": None}
    found = LocalAndGlobal(sliding_window=window, full_attention_every=every)
    if types != layer_types(found, len(types)):
        raise UserError(f"layer_types: our models have {GLOBAL} in every n-th layer and {LOCAL} in the others")
    return {"sliding_window": window, "full_attention_every": every}


def _rotation_to_theirs(rotation: Rotation) -> Json:
    if rotation.factor == 1.0:
        return {"rope_type": "default", "rope_theta": rotation.base}
    return {"rope_type": "linear", "rope_theta": rotation.base, "factor": rotation.factor}


def rotation_to_ours(parameters: Json) -> Json:
    """Our settings of the rotation. Raises UserError for RoPE that is scaled in another way than linearly."""
    kind = parameters["rope_type"]
    if kind not in ("default", "linear"):
        raise UserError(f"rope_parameters: rope_type is {kind!r}, but must be 'default' or 'linear'")
    factor = parameters["factor"] if kind == "linear" else 1.0
    return {"rope_base": parameters["rope_theta"], "rope_factor": factor}
