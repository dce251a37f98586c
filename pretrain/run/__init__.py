"""A run's directory and state: status, lock, logs, signals, watchdog, what it ran on."""
