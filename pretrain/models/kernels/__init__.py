"""Attention on GPUs in Triton, and fast products on CPUs, each beside the plain form that defines it."""

GRANULE = 64  # positions for each entry of the ranges of what is visible, which spare a kernel whole tiles
MARGIN = 128  # unused diagonals on both sides of a bias, so that a tile that sticks out reads none of another head
