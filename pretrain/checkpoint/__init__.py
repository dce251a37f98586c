"""Checkpoints: directories such as `checkpoints/step-00001000`, which appear only when complete and hold no pickles."""

CONFIG = "config.yaml"


def rank_file(rank: int) -> str:
    """The name, without suffix, of the files of `rank`: .safetensors, and .json with its fragments."""
    return f"rank-{rank:05d}"
