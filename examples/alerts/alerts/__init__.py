"""Alerts of a run, by a command or a webhook. A run file has them as `callbacks: [{name: "alerts:Alerts", …}]`."""

from alerts.callback import Alerts

__all__ = ["Alerts"]
