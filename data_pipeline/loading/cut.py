"""How a global batch is cut into ranks and micro-batches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """A global batch is `ranks` × `accumulation` × `micro_batch` rows; this process is `rank`."""

    rank: int
    ranks: int
    micro_batch: int
    accumulation: int

    @property
    def global_batch(self) -> int:
        return self.ranks * self.accumulation * self.micro_batch
