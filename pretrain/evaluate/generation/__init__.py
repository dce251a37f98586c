"""Text generation: greedy, beam search or sampling, the same for every family."""
