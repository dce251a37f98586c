"""How a run divides the rows of its steps among ranks and micro-batches."""

from dataclasses import dataclass

from data_pipeline.loading.batch_layout import BatchLayout
from pretrain.config.run_config import BatchSection


@dataclass(frozen=True)
class BatchPlan:
    """Micro-batches of `micro_batch` rows on each of `ranks` ranks; this process is `rank`.

    The rows of a step grow with `batch.ramp_up`, and with them its micro-batches, never their size.
    """

    batch: BatchSection
    rank: int
    ranks: int
    micro_batch: int

    @property
    def layout(self) -> BatchLayout:
        """That of steps after the ramp-up."""
        accumulation = self.batch.global_batch_size // self.ranks // self.micro_batch
        return BatchLayout(self.rank, self.ranks, self.micro_batch, accumulation)

    def accumulation(self, step: int) -> int:
        """Micro-batches of each rank in step `step` (from 0)."""
        return self.batch.rows(step) // (self.ranks * self.micro_batch)
