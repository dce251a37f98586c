"""From raw text to shards, and from shards to batches."""
