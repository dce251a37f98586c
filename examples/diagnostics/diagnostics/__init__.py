"""Evaluation hooks that show how a model learns: attention, vectors, norms, a breakdown of the loss, continuations."""

import pretrain.config  # noqa: F401  it imports `.settings`, which must not be half-read by then
