"""What reproduces results, run from a checkout: `python -m experiments.ladder`, `python -m experiments.mup`."""
