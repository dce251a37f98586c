"""Checkpoints: directories such as `checkpoints/step-00001000`. They appear only when they are complete, and hold no
pickles."""

CONFIG = "config.yaml"
BUFFERS = "buffers.safetensors"
"""The values that a model computes with and doesn't train, such as an imported BART's final_logits_bias.

Only buffers that aren't all zeros are written; most checkpoints have no such file.
"""


def rank_file(rank: int) -> str:
    """The name, without suffix, of the files of `rank`: .safetensors, and .json with its fragments."""
    return f"rank-{rank:05d}"
