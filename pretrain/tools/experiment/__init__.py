"""Experiments: the run files of a folder, each trained with several seeds and compared."""

MOST_RUNS = 1000  # of a row, or at the same time
