"""A run's directory and state: status, lock, attempts, logs, metrics, heartbeats, watchdog, what it ran on."""
