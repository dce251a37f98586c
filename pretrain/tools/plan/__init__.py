"""What a run needs before it is started: memory, time and cost on a number of GPUs. Uses no GPU and no network."""
