"""The metrics of a run: their log, MLflow, throughput, and the dashboard."""
