"""Training: a run is checked before it starts, takes its steps, and reports what it measures."""
