"""Checkpoints: complete or not there, without pickles. A directory `checkpoints/step-00001000`, files named here."""

CONFIG = "config.yaml"


def rank_file(rank: int) -> str:
    """Name, without suffix, of what `rank` writes: .safetensors, and .json for where its fragments belong."""
    return f"rank-{rank:05d}"
