"""Checks and reactions that keep a run alive and honest."""
