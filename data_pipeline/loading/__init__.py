"""Shards to batches: order by arithmetic, so that the state is a position."""
