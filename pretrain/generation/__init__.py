"""Text out of a model: greedy, by beam search or sampled, the same way for every family."""
