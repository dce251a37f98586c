"""Tools beside a run: each a command of its own, which the path of a run doesn't need."""
