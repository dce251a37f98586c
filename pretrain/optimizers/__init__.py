"""Optimizers, schedules, and the map from parameters to the flat slices that ZeRO hands them."""
