"""The pages of a corpus's report: report.md and report.html show the same tables."""

from data_pipeline.tools.report.pages import render

__all__ = ["render"]
