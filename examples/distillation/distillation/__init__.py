"""Distillation: an encoder-decoder learns prefix LM from a decoder-only teacher, besides the text."""
