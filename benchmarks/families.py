"""Shared by the benchmarks of the model families: the families, and tables for the terminal and a page."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from harness import Json, Table
from rich.console import Console

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"

ENCODER_DECODER = {"num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
LAYERS = {"num_heads": 4, "num_layers": 3}
EMBEDDING_LOSS = {"kind": "mse", "coefficient": 8.0}
# The rows that are compared are longer than these windows.
WINDOWS = {"sliding_window": 6, "full_attention_every": 2}
ROTARY = {"family": "decoder_only", **LAYERS, "positions": "rotary", "biases": False}
GEMMA = {
    **ROTARY,
    "norm": "rms_around_one",
    "norm_after": True,
    "activation": "geglu",
    "scale_embedding": True,
    "num_key_value_heads": 2,
}
# What is compared: each family, with the settings of its config that are not sizes.
KINDS: dict[str, Json] = {
    "T5 v1.0": {"family": "t5", **ENCODER_DECODER, "feed_forward": "relu", "tie_embeddings": True},
    "T5 v1.1": {"family": "t5", **ENCODER_DECODER},
    "BART": {"family": "bart", **ENCODER_DECODER, "dropout_rate": 0.0},
    "vanilla": {"family": "vanilla", **ENCODER_DECODER, "dropout_rate": 0.0},
    "modern": {"family": "modern", **WINDOWS},
    # transformers gives the embedding of padding no gradient, so the decoder doesn't start from it
    "T5Gemma": {"family": "t5gemma", "bos_id": 2, **WINDOWS},
    "T5Gemma 2": {
        "family": "t5gemma2",
        "bos_id": 2,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "num_layers": 4,
        **WINDOWS,
    },
    "autoregressive": {
        "family": "autoregressive",
        **ENCODER_DECODER,
        "subtract_positions": "without_norm",
        "embedding_loss": EMBEDDING_LOSS,
    },
    "decoder_only": {"family": "decoder_only", **LAYERS},
    "decoder_only, Llama's layers": {**ROTARY, "norm": "rms", "activation": "swiglu", "num_key_value_heads": 2},
    "decoder_only, Qwen3's layers": {
        **ROTARY,
        "norm": "rms",
        "activation": "swiglu",
        "num_key_value_heads": 2,
        "qk_norm": True,
    },
    "decoder_only, Gemma 2's layers": {**GEMMA, **WINDOWS, "attention_softcap": 50.0, "output_softcap": 30.0},
    "decoder_only, Gemma 3's layers": {**GEMMA, **WINDOWS, "qk_norm": True, "rope_base": 1e6, "window_rope_base": 1e4},
    "encoder_only": {"family": "encoder_only", **LAYERS},
}


def write(page: Path, table: Table) -> None:
    """Puts the table between the markers of `page`; it replaces an older version and leaves other tables unchanged."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    held, after = rest.split(END, 1)
    parts = {part.split("\n", 1)[0].split(":")[0]: part for part in held.strip().split("\n\n### ") if part}
    kept = {key.removeprefix("### "): part.removeprefix("### ") for key, part in parts.items()}
    kept[table.title.split(":")[0]] = table.markdown
    body = "\n\n".join(f"### {part.strip()}" for part in kept.values())
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def arguments_of(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page with the markers of the tables")
    return parser.parse_args()


def show(tables: Iterable[Table], page: Path | None) -> None:
    """Prints each table as soon as it is ready, and writes it into `page`."""
    console = Console(width=180)
    for table in tables:
        table.show(console)
        if page:
            write(page, table)
