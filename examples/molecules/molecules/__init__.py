"""Molecules: MOSES' data, its metrics as a hook, and scaffolds that a model decorates."""

import pretrain.config  # noqa: F401  it imports `.settings`, which must not be half-read by then
