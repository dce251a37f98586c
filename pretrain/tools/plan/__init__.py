"""A forecast of a run before it is started: memory, time and cost on a number of GPUs. Uses no GPU and no network."""
