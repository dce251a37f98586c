"""A run's directory and state: status, lock, attempts, logs, metrics, heartbeats, watchdog, environment."""

ARTIFACTS_DIRECTORY = "artifacts"  # of a run directory: files that MLflow shows
