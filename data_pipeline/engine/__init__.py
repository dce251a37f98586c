"""Runs units of work on Ray, keeps records of finished units, and merges sorted files."""
