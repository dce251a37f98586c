"""What all three packages share: errors, files, locks, config files, commands, signals, progress."""
