"""Checkpoints of the author's code of the autoregressive encoder-decoder become checkpoints of this project."""
