"""Records the rows that each step of a run takes, and computes those that it should take."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import Batch, TrainingBatches
from data_pipeline.loading.stream import Stream


def digests(batch: Batch) -> list[str]:
    """A digest for each row of a batch."""
    rows = zip(batch["encoder_input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    return [hashlib.blake2b(repr(row).encode(), digest_size=8).hexdigest() for row in rows]


def record_steps(engine: type) -> None:
    """Makes each step of an Engine append its rows to its process's file in RECORDED_ROWS before it is taken."""
    take_step = engine.step
    path = Path(os.environ["RECORDED_ROWS"]) / f"{time.monotonic_ns()}-{os.getpid()}.jsonl"

    def step(self: Any, step: int, row_offsets: list[int], batches: list[Batch], *arguments: Any) -> Any:
        rows = [digest for batch in batches for digest in digests(batch)]
        with path.open("a") as file:
            file.write(
                json.dumps({"step": step, "rank": dist.get_rank(), "ranks": dist.get_world_size(), "rows": rows}) + "\n"
            )
        return take_step(self, step, row_offsets, batches, *arguments)

    engine.step = step


def recorded_rows(folder: Path) -> dict[int, list[str]]:
    """Digests of the rows of each step, from the ranks of the last attempt that took it."""
    steps: dict[int, dict[int, list[str]]] = {}
    worlds: dict[int, int] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.name.split("-")[0])):
        for line in path.read_text().splitlines():
            try:
                one = json.loads(line)
            except ValueError:
                continue  # its writer was killed
            step, ranks = one["step"], one["ranks"]
            if worlds.get(step) != ranks:
                worlds[step], steps[step] = ranks, {}
            steps[step][one["rank"]] = one["rows"]
    return {
        step: [digest for rank in range(worlds[step]) for digest in steps[step].get(rank, [])] for step in sorted(steps)
    }


def scheduled_rows(stream: Stream, rows_per_step: int, steps: int) -> dict[int, list[str]]:
    """Digests of the rows that each step should take."""
    batches = TrainingBatches(stream, BatchLayout(0, 1, rows_per_step, 1))
    return {step: digests(loaded[0]) for step, loaded in enumerate(batches.loader(steps, 0))}


def largest_relative_difference(found: dict[int, float], wanted: dict[int, float]) -> float:
    """The largest relative difference between losses by step; infinite if a step is missing."""
    if found.keys() != wanted.keys():
        return float("inf")
    return float(np.max([abs(found[step] - wanted[step]) / abs(wanted[step]) for step in wanted]))
