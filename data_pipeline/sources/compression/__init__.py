"""Compressed streams, read whole or from a given byte."""
