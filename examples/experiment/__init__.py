"""Experiments: the run files of a folder, each trained with several seeds and compared."""
