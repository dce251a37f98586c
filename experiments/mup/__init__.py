"""`python -m experiments.mup`: whether a model's activations and best learning rate stay the same over widths."""
