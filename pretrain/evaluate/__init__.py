"""Evaluation inside training: hooks that all ranks run together."""
