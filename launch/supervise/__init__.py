"""Supervising a run: its head, which decides, and the ranks of each node."""

from launch.supervise.head import supervise

__all__ = ["supervise"]
