"""Metrics: the log, MLflow, throughput, the dashboard."""
