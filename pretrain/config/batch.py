"""The `batch:` section of a run file, and how ranks and micro-batches divide the rows of a step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from data_pipeline.base.config_file import Section
from data_pipeline.loading.batch_layout import BatchLayout

Rows = Annotated[int, Field(gt=0, le=2**20)]  # of a step: a rank holds all micro-batches of its share
# A run of the largest batch has fewer than 2^62 rows, which the numbers of a checkpoint and its loader count.
Steps = Annotated[int, Field(gt=0, le=10**9)]


class RampUp(Section):
    """A smaller global batch for the first steps."""

    until_step: Steps
    """The first step after this entry; steps count from 0."""
    global_batch_size: Rows
    """Rows per optimizer step before `until_step`, over all ranks."""


class BatchSection(Section):
    """Batch sizes, in rows. A row is one training sequence: an input with its target."""

    global_batch_size: Rows
    """Rows per optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Rows per forward pass on a rank. Gradient accumulation over micro-batches makes up the step. `auto`: measured at
    the start, the largest size that fits into memory, or on a GPU the fastest. null: all rows of a rank in one
    micro-batch; with `ramp_up`, the largest number that divides a rank's rows of every step."""
    ramp_up: list[RampUp] = []
    """Smaller global batches for the first steps, in order."""

    def rows_before(self, step: int) -> int:
        """Rows of the steps before `step`, over all ranks.

        8 rows a step, and 16 from step 3 on: 8 · 5 + 8 · (5 − 3) = 56 before step 5.
        """
        sizes = [*(ramp.global_batch_size for ramp in self.ramp_up), self.global_batch_size]
        begins = [0, *(ramp.until_step for ramp in self.ramp_up)]
        added = (size - before for before, size in pairwise([0, *sizes]))
        return sum(more * max(0, step - begin) for more, begin in zip(added, begins, strict=True))

    @model_validator(mode="after")
    def _ramp_goes_up(self) -> "BatchSection":
        steps = [ramp.until_step for ramp in self.ramp_up]
        sizes = [*(ramp.global_batch_size for ramp in self.ramp_up), self.global_batch_size]
        if steps != sorted(set(steps)) or sizes != sorted(sizes):
            raise ValueError("ramp_up: until_step and global_batch_size must grow from one entry to the next")
        return self


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of a step are divided into micro-batches of equal size on each of `ranks` ranks.

    A ramp-up (`batch.ramp_up`) changes the number of micro-batches in a step, never their size.

    Attributes:
        batch: the section of the run file.
        ranks: the number of ranks.
        rank: the rank of this process.
        measured: rows of a micro-batch, for `auto` once it is measured, or for another size that is tried.
    """

    batch: BatchSection
    ranks: int
    rank: int = 0
    measured: int | None = None

    @property
    def is_open(self) -> bool:
        """True if the micro-batch size is `auto` and not measured yet."""
        return self.batch.micro_batch_size == "auto" and self.measured is None

    @property
    def share(self) -> int:
        """The largest possible micro-batch: a rank's rows of every step are a multiple of this number."""
        ramp = (one.global_batch_size for one in self.batch.ramp_up)
        return math.gcd(self.batch.global_batch_size, *ramp) // self.ranks

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch; the largest possible number until it is measured."""
        size = self.batch.micro_batch_size
        return self.measured or (size if isinstance(size, int) else self.share)

    @property
    def layout(self) -> BatchLayout:
        """The layout of steps after the ramp-up."""
        accumulation = self.batch.global_batch_size // self.ranks // self.micro_batch
        return BatchLayout(self.rank, self.ranks, self.micro_batch, accumulation)

    def accumulations(self, start: int, stop: int) -> Iterator[int]:
        """Micro-batches per rank in each step from `start` (from 0) up to, not including, `stop`."""
        sizes = [*(ramp.global_batch_size for ramp in self.batch.ramp_up), self.batch.global_batch_size]
        ends = [*(min(max(start, ramp.until_step), stop) for ramp in self.batch.ramp_up), stop]
        steps = (end - begin for begin, end in pairwise([start, *ends]))
        of_each = (rows // (self.ranks * self.micro_batch) for rows in sizes)
        return chain.from_iterable(map(repeat, of_each, steps))

    def problems(self) -> list[str]:
        """The reasons why the ranks can't divide the batches, one line each."""
        batch, ranks = self.batch, self.ranks
        sizes = {f"batch.ramp_up.{i}.global_batch_size": one.global_batch_size for i, one in enumerate(batch.ramp_up)}
        sizes["batch.global_batch_size"] = batch.global_batch_size
        if uneven := {key: rows for key, rows in sizes.items() if rows % ranks}:
            return [f"{key}: {rows} rows can't be divided evenly among {ranks} ranks" for key, rows in uneven.items()]
        if self.share % self.micro_batch == 0:
            return []
        ramp = " in each step of the ramp-up" if batch.ramp_up else ""
        share = f"a rank's share of {self.share} rows{ramp}"
        return [f"batch.micro_batch_size: {self.micro_batch} doesn't divide {share}"]
