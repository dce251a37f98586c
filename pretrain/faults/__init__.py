"""What keeps a run alive and honest."""
