"""Callbacks that look for silent errors: arithmetic, memory or weights that are wrong without any message.

- replay: computes the gradients of some steps twice.
- memory_at_rest: compares checksums of weights and moments between two updates.
- fingerprints: compares the weights of all ranks before each save, and after each load with those that were saved.
"""
