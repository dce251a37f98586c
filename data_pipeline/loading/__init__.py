"""From shards to batches. The order is computed, so a position is the whole state."""
