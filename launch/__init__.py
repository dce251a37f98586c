"""Starts and supervises runs: on one machine, on hosts, under SLURM."""
