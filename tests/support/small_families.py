"""A model of each family that is small, and of sizes that the kernels take."""

from typing import Any

WIDTHS = {"d_model": 64, "d_ff": 128, "num_heads": 4}
STACKS = {**WIDTHS, "num_encoder_layers": 2, "num_decoder_layers": 2}
STACK = {**WIDTHS, "num_key_value_heads": 2, "num_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"family": "t5", **STACKS, "d_kv": 16},
    "bart": {"family": "bart", **STACKS, "max_positions": 130, "dropout_rate": 0.0},
    "vanilla": {"family": "vanilla", **STACKS, "dropout_rate": 0.0},
    "t5gemma": {"family": "t5gemma", "encoder": STACK, "decoder": STACK, "sliding_window": 40},
    "t5gemma2": {"family": "t5gemma2", **STACK, "sliding_window": 40, "full_attention_every": 2},
    "autoregressive": {"family": "autoregressive", **STACKS, "max_positions": 130, "dropout_rate": 0.0},
    "double_decoder": {"family": "double_decoder", **STACKS},
    "decoder_only": {"family": "decoder_only", **WIDTHS, "num_layers": 3, "max_positions": 130},
    "encoder_only": {"family": "encoder_only", **WIDTHS, "num_layers": 3, "max_positions": 130},
}
