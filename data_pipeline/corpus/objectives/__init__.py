"""Objectives: pure functions from (tokens, row keys) to inputs and targets, one file for each."""
