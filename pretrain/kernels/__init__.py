"""Attention on GPUs in Triton, and fast products on CPUs, each beside the plain form that defines it."""

GRANULE = 64  # positions for each entry of the ranges of what is visible, which spare a kernel whole tiles
