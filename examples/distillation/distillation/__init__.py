"""Distillation: an encoder-decoder learns from a larger one, or from a decoder, besides the text."""
