"""The block-based double decoder (2026, arXiv 2605.18807), a family of models."""

import pretrain.config  # noqa: F401  it imports `.settings`, which must not be half-read by then
