"""Compressed streams, whole or from a byte on."""
