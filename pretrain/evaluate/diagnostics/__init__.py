"""Hooks that show how a model learns: attention maps, vectors, norms and a breakdown of the loss. Off by default."""
