"""Text generation: greedy decoding, beam search or sampling, the same for every family."""
