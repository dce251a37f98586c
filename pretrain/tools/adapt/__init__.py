"""Adaptation: a decoder-only model becomes an encoder-decoder (Zhang et al. 2025, "Encoder-Decoder Gemma")."""
