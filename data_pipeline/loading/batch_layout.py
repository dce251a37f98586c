"""How a global batch is divided among ranks and micro-batches, and how its labels mark what has no loss."""

from dataclasses import dataclass

LABELS = ("labels",)  # tensors of a batch whose losses count
IGNORE_INDEX = -100  # the label of a position without a target: padding, or a row of weight zero


@dataclass(frozen=True)
class BatchLayout:
    """A global batch has `ranks` × `accumulation` × `micro_batch` rows; this process is `rank`."""

    rank: int
    ranks: int
    micro_batch: int
    accumulation: int

    def rows(self, accumulation: int) -> int:
        """Rows in a step with `accumulation` micro-batches on each rank."""
        return self.ranks * accumulation * self.micro_batch

    def row_offsets(self, position: int, accumulation: int) -> list[int]:
        """Positions where this rank's `accumulation` micro-batches begin, in a step that begins at `position`."""
        begin = position + self.rank * accumulation * self.micro_batch
        return [begin + micro * self.micro_batch for micro in range(accumulation)]
