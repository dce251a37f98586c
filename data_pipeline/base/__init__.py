"""Shared by all three packages: errors, files, locks, config files, commands, signals, progress."""
