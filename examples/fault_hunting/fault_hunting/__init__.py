"""Callbacks that find faulty hardware while a run trains. A run file names those that it wants."""

from fault_hunting.memory import MemoryChecksums, WeightComparison
from fault_hunting.replay import Replay
from fault_hunting.stragglers import Stragglers

__all__ = ["MemoryChecksums", "Replay", "Stragglers", "WeightComparison"]
