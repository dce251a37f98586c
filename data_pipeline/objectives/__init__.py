"""Pure functions from (tokens, row keys) to inputs and targets."""
