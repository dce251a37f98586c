"""Callbacks that detect silent errors: wrong arithmetic, memory or weights without any error message.

- replay: computes the gradients of some steps twice.
- memory_at_rest: verifies checksums of weights and moments between two updates.
- fingerprints: compares the weights of all ranks before each save, and loaded weights with the saved ones.
"""
