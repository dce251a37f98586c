"""Raw text to shards, and shards to batches."""
