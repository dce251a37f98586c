"""MLflow: the thread and the commands that feed it, and its UI."""

import os

# MLflow would report its use to its developers; it reads this when it is imported, and so does its server
os.environ.update({"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"})
