"""`batch.micro_batch_size: auto`: finds the largest micro-batch that fits into memory; on a GPU, the fastest
micro-batch that fits.

Two small micro-batches go forward and backward. Their memory peaks give a linear model, a + b · rows of tensors; each
row of a tensor counts as `data.packing_ratio` rows of the run. The search never runs out of memory on purpose. The
search leaves room for the optimizer's state, which is not allocated yet, and on a CPU for the copies of the state
for checkpoints. Temporary tensors of the optimizer need no room: they are allocated after activations are freed, except
with CUDA graphs.

On a GPU the largest sizes that fit are timed: the time per row grows again where tiles no longer fill the GPU evenly.
The choice is kept in the run directory: with another micro-batch, a resumed run's losses would differ in their last
bits.
"""

import statistics
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import PositiveInt

from data_pipeline.base.atomic import fingerprint, write_json
from data_pipeline.base.json_file import read_valid_json
from data_pipeline.corpus.example_rows import width_of
from data_pipeline.loading.batches import Batch, TrainingBatches, widened
from data_pipeline.loading.prefetch import with_counts, with_target_indices
from pretrain.config.batch import BatchPlan
from pretrain.engine.checkpoint.engine_state import copy_bytes
from pretrain.engine.construction import compiles, forget_compiled
from pretrain.engine.engine import Engine
from pretrain.engine.memory import SAFE, DeviceMemory
from pretrain.engine.ranks import max_over_ranks, min_over_ranks, on_rank_0
from pretrain.training.prepare import PreparedRun

FILE = "micro_batch.json"
PROBES = (1, 4)  # rows of tensors
PASSES = 3  # of each probe: memory that the allocator keeps between passes adds to the peak
TIMED = 4  # sizes at most, from the largest that fits down
_VARIES = 0.02  # of a step's time


@dataclass(frozen=True)
class Choice:
    """RUN/micro_batch.json. `measured_for`: all facts on which the choice depends."""

    micro_batch_size: PositiveInt
    measured_for: dict[str, Any]


def choose(run: PreparedRun, engine: Engine) -> BatchPlan:
    """The run's plan with a micro-batch size, which is measured for `auto`. All ranks call this together before the
    first step.

    The size divides a rank's share of a step, so the global batch stays as it is.
    """
    if not run.plan.is_open:
        return run.plan
    conditions = _conditions(run, engine)

    def earlier() -> int | None:
        """The choice of an earlier start under the same conditions."""
        choice = read_valid_json(run.directory / FILE, Choice)
        return choice.micro_batch_size if choice and choice.measured_for == conditions else None

    rows = on_rank_0(earlier, int | None) or _fastest(run, engine)
    if run.world.rank == 0:
        write_json(run.directory / FILE, asdict(Choice(rows, conditions)))
    return replace(run.plan, measured=rows)


def _conditions(run: PreparedRun, engine: Engine) -> dict[str, Any]:
    config, cuda = run.config, engine.device.type == "cuda"
    settings = [config.precision, *(part.model_dump() for part in (config.deepspeed, config.compute, config.optimizer))]
    return {
        "rows": run.plan.share,
        "lengths": list(run.lengths),
        "pack": run.stream.pack,
        "ranks": run.world.size,
        "zero_stage": config.zero_stage,
        "device": torch.cuda.get_device_name(engine.device) if cuda else "cpu",
        "gibibytes": DeviceMemory(engine.device).total() // 2**30,
        "model": fingerprint(run.model.model_dump()),
        "settings": fingerprint(settings),
        "wrapper": run.identity["wrapper"],
    }


def _fastest(run: PreparedRun, engine: Engine) -> int:
    each = examples_per_row(run)
    fitting = _fitting(run, engine, each)
    if engine.device.type != "cuda":  # on a CPU a larger micro-batch is hardly slower, and times vary more than that
        return fitting[-1]
    microseconds: dict[int, float] = {}
    for rows in fitting[-TIMED:]:
        batch = on_gpu(full_rows(run, -(-rows // each), each, masked=False), engine.device)
        if _fits(run, engine, batch):
            # all ranks must choose the same size: the slowest rank decides
            microseconds[rows] = float(max_over_ranks(_microseconds(engine, batch)))
    if compiles(run.config.compute):
        forget_compiled()  # layers compiled for any number of rows are slower than for one number
    return fastest(microseconds, run.plan.share) if microseconds else fitting[0]


def on_gpu(batch: Batch, device: torch.device) -> Batch:
    """A batch as the loader brings it to a GPU."""
    return {name: tensor.to(device) for name, tensor in with_counts(with_target_indices(batch)).items()}


def _fits(run: PreparedRun, engine: Engine, batch: Batch) -> bool:
    """True if a pass over the batch fits into the memory of each rank. If ranks wait for one another within a pass,
    running out of memory ends the run instead: the other ranks would wait for ever."""
    if not engine.sharding.local:
        engine.measure(batch)
        return True
    try:
        engine.measure(batch)
        fits = True
    except torch.OutOfMemoryError:
        fits = False
    return bool(min_over_ranks(fits))


def fastest(seconds: dict[int, float], share: int) -> int:
    """The micro-batch size with which the `share` rows of a step take least time, given the `seconds` of each size. Of
    sizes whose times differ by no more than times vary, the largest.

        {16: 0.10, 32: 0.18}, 64 → 32        {16: 0.10, 32: 0.22}, 64 → 16
    """
    of_step = {rows: share / rows * taken for rows, taken in seconds.items()}
    return max(rows for rows, taken in of_step.items() if taken <= (1 + _VARIES) * min(of_step.values()))


def _microseconds(engine: Engine, batch: Batch) -> int:
    """The median time of a pass on a GPU. The first pass, which chooses kernels and allocates memory, doesn't count."""
    taken = []
    for _ in range(1 + PASSES):
        torch.cuda.synchronize(engine.device)
        started = time.perf_counter()
        engine.measure(batch)
        torch.cuda.synchronize(engine.device)
        taken.append(time.perf_counter() - started)
    return round(1e6 * statistics.median(taken[1:]))


def _fitting(run: PreparedRun, engine: Engine, of_each: int) -> list[int]:
    """The micro-batch sizes that fit into the memory of the rank with the least memory, ascending: divisors of a rank's
    share. `of_each`: `examples_per_row`."""
    share = run.plan.share
    few, more = (min(rows, -(-share // of_each)) for rows in PROBES)
    rows = full_rows(run, more, of_each)
    memory = DeviceMemory(engine.device)
    free = SAFE * memory.free() - _to_come(run, engine)
    if not _fits(run, engine, rows):  # the first pass also allocates kernels and buffers of collectives, once
        return [1]
    parts = [{name: tensor[:count] for name, tensor in rows.items()} for count in (few, more)]
    peaks = [memory.peak(partial(_passes, engine, part)) for part in parts]
    each = max(0, peaks[1] - peaks[0]) / max(1, more - few)
    sizes = [n for n in range(1, share + 1) if share % n == 0]
    largest = max((n for n in sizes if peaks[1] + each * (-(-n // of_each) - more) <= free), default=1)
    agreed = min_over_ranks(largest)
    return [n for n in sizes if n <= agreed]


def _passes(engine: Engine, batch: Batch) -> None:
    for _ in range(PASSES):
        engine.measure(batch)


def _to_come(run: PreparedRun, engine: Engine) -> int:
    """Bytes that this rank will allocate later, besides rows: the optimizer's state. On a CPU also the copy from which
    checkpoints are written. On a GPU with CUDA graphs, which keep the memory of rows, also the optimizer's temporary
    tensors."""
    copied = 0
    if engine.device.type == "cuda" and engine.in_few_shapes:
        copied = engine.config.optimizer.step_bytes * engine.own_elements
    if engine.device.type == "cpu":
        copied += copy_bytes(engine)
    return copied if engine.optimizer.state else copied + engine.state_bytes


def full_rows(run: PreparedRun, count: int, each: int, masked: bool = True) -> Batch:
    """`count` rows of tensors, of the greatest width that `data.packing_ratio` and the objectives of the run allow.

    `each`: `examples_per_row`. `masked`: with an attention mask, which takes memory, even if the rows need none.
    """
    inputs, targets = (width_of(each * length) if each > 1 else length for length in run.lengths)
    batch = {name: tensor[:count] for name, tensor in _first_rows(run, count * each).items()}
    if masked:
        batch.setdefault("encoder_attention_mask", torch.ones_like(batch["encoder_input_ids"]))
    return widened(batch, inputs, targets, fill={})  # padded labels, 0, count: their logits take memory


def examples_per_row(run: PreparedRun) -> int:
    """Maximum number of the run's rows in a row of a tensor: `data.packing_ratio`, or 1 if corpora are packed."""
    packed = min(run.stream.pack, run.plan.share)
    return packed if len(_first_rows(run, packed)["labels"]) == 1 else 1


def _first_rows(run: PreparedRun, count: int) -> Batch:
    """A micro-batch of `count` rows of the run: the first rows after the curriculum."""
    uncut = max((until for until, _ in run.stream.curriculum), default=0)
    return TrainingBatches(run.stream, replace(run.plan, measured=count).layout)[uncut].batch
