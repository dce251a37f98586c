"""Pretraining of encoder-decoder models with DeepSpeed."""
