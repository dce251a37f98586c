"""MLflow: the thread and the command that feed it."""

import os

# MLflow would report its use to its developers; it reads this when it is imported
os.environ.update({"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"})
