"""A few forward and backward passes of a model on this CPU, with one thread and with all: what a step takes now.

They run in a program of their own, which is ended where they take too long: the question comes as JSON on stdin.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from pretrain import models
from pretrain.config.models import ModelConfig
from pretrain.hardware import threads_per_rank

_PASSES = 3  # the first one isn't timed
_BUSY = 1.25  # wall time over processor time of one thread, or of all threads over one, from which others take part
_SECONDS = 5.0  # after which no further pass begins
PATIENCE = 60.0  # s


@dataclass(frozen=True)
class Passes:
    """Seconds of a pass of one row, forward and backward: wall time with one thread and with all `threads`, and the
    processor time with one. `load`: how many other processes wanted to run in the minute before."""

    one: float
    all: float
    processor: float
    threads: int
    load: float

    @property
    def busy(self) -> bool:
        """True if other processes take part of the cores: a thread doesn't run all the time, or they are there and more
        threads take no less time than one."""
        others = self.load >= 1 or math.isinf(self.all)
        return self.one > _BUSY * self.processor or (others and self.threads > 1 and self.all * _BUSY > self.one)

    @property
    def idle(self) -> float:
        """Seconds of the same pass if nothing else ran: measured, or on a busy machine its processor time by cores."""
        return self.processor / min(self.threads, psutil.cpu_count(logical=False) or 1) if self.busy else self.all


def measure(config: ModelConfig, rows: int, lengths: tuple[int, int], precision: str) -> Passes | None:
    """Passes of micro-batches of `rows`, `lengths` tokens each.

    `all` is infinite if only those with one thread end in `PATIENCE`. None if not even these do, or the program fails.
    """
    question = {"model": config.model_dump(), "rows": rows, "lengths": lengths, "precision": precision}
    load, asked = os.getloadavg()[0], json.dumps(question)
    program = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(program, input=asked, capture_output=True, text=True, timeout=PATIENCE)
        printed = done.stdout
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    found = [tuple(map(float, line.split())) for line in printed.splitlines()]
    if not found:
        return None
    (one, processor), (every, _) = found[0], found[1] if len(found) > 1 else (math.inf, math.inf)
    return Passes(one, every, processor, threads_per_rank(1), load)


def _measured(question: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """Wall and processor time of a row, with one thread and then with all."""
    torch.manual_seed(0)
    config, rows, (inputs, targets) = models.parse(question["model"]), question["rows"], question["lengths"]
    model = models.build(config).to(torch.bfloat16 if question["precision"] == "bf16" else torch.float32)
    ids, labels = (torch.randint(3, config.vocab_size or 0, (rows, length)) for length in (inputs, targets))
    batch = {"encoder_input_ids": ids, "labels": labels, "encoder_attention_mask": torch.ones_like(ids)}

    def seconds(threads: int) -> tuple[float, float]:
        """Wall and processor time of a row, of the fastest pass."""
        torch.set_num_threads(threads)
        taken: list[tuple[float, float]] = []
        begun = time.perf_counter()
        while len(taken) < _PASSES and not (len(taken) > 1 and time.perf_counter() - begun > _SECONDS):
            wall, processor = time.perf_counter(), time.process_time()
            torch.stack([losses.sum() for losses in model(**batch).values()]).sum().backward()
            taken.append(((time.perf_counter() - wall) / rows, (time.process_time() - processor) / rows))
        return min(taken[1:])

    yield seconds(1)
    yield seconds(threads_per_rank(1))


if __name__ == "__main__":
    for seconds in _measured(json.load(sys.stdin)):
        print(*seconds, flush=True)
