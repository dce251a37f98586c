"""The metrics of a run: their log, throughput, the system's metrics, and curves in the terminal."""
