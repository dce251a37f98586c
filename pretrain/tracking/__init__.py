"""MLflow: the thread and the commands that feed it, its UI, and the registry of models."""
