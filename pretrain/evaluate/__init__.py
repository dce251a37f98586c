"""Evaluation during training and on checkpoints: hooks, generation, tasks of the lm-evaluation-harness."""
