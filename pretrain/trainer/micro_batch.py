"""`batch.micro_batch_size: auto`: the largest micro-batch that fits into memory.

Two small micro-batches go forward and backward, and their memory peaks give a linear model, a + b · rows. The search
never runs out of memory on purpose. It leaves room for the moments that the optimizer has yet to allocate, but not for
the optimizer's temporary tensors: they exist when those of the rows no longer do. The choice is kept in the run
directory: with another one, a resumed run's losses would differ in their last bits.
"""

from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from pydantic import PositiveInt

from data_pipeline.foundation.atomic import fingerprint, write_json
from data_pipeline.foundation.json_file import read_valid_json
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import LABELS, Batch, TrainingBatches
from pretrain.checkpoint.index import Identity
from pretrain.models.loss import PARTS
from pretrain.trainer import teacher_checks
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.deepspeed_private import fragments, keeping_counters, optimizer_state
from pretrain.zero.engine import Engine
from pretrain.zero.memory import SAFE, DeviceMemory
from pretrain.zero.ranks import least, on_rank_0

FILE = "micro_batch.json"
PROBES = (1, 4)  # rows
PASSES = 3  # of each probe: memory that the allocator keeps between passes adds to the peak
_AVERAGE = 4  # bytes per element of the parameters' moving average
_MOMENTS = 8  # bytes per element: two fp32 moments, the most that any optimizer keeps


@dataclass(frozen=True)
class Conditions:
    """Everything that decides how much memory rows need and how much there is."""

    rows: int
    lengths: tuple[int, int]
    ranks: int
    zero_stage: int
    device: str
    model: str
    settings: str
    distillation: Identity | None = None


@dataclass(frozen=True)
class Choice:
    """RUN/micro_batch.json."""

    micro_batch_size: PositiveInt
    measured_for: Conditions


def choose(run: ValidatedRun, engine: Engine) -> int:
    """The rows of a micro-batch, the same on all ranks, which call this together before the first step.

    They divide a rank's share of a step, so the global batch stays as it is.
    """
    conditions = _conditions(run, engine)
    rows = on_rank_0(lambda: _earlier_choice(run, conditions)) or _largest(run, engine)
    if run.rank == 0:
        write_json(run.directory / FILE, asdict(Choice(rows, conditions)))
    return rows


def _conditions(run: ValidatedRun, engine: Engine) -> Conditions:
    config, cuda = run.config, engine.device.type == "cuda"
    settings = [config.precision, *(part.model_dump() for part in (config.deepspeed, config.compute, config.optimizer))]
    return Conditions(
        rows=config.batch.share(run.ranks),
        lengths=run.lengths,
        ranks=run.ranks,
        zero_stage=config.zero_stage,
        device=torch.cuda.get_device_name(engine.device) if cuda else "cpu",
        model=fingerprint(run.model.model_dump()),
        settings=fingerprint(settings),
        distillation=teacher_checks.identity(config.distillation),
    )


def _earlier_choice(run: ValidatedRun, conditions: Conditions) -> int | None:
    """The choice of an earlier start under the same conditions."""
    choice = read_valid_json(run.directory / FILE, Choice)
    return choice.micro_batch_size if choice and choice.measured_for == conditions else None


def _largest(run: ValidatedRun, engine: Engine) -> int:
    share = run.config.batch.share(run.ranks)
    few, more = (min(rows, share) for rows in PROBES)
    rows = _full_rows(run, more)
    memory = DeviceMemory(engine.device)
    free = SAFE * memory.free() - _moments_to_come(engine)
    _pass(engine, rows)  # allocates what is allocated once: kernels, buffers of collectives
    peaks = [memory.peak(partial(_passes, engine, _first(rows, count))) for count in (few, more)]
    each = max(0, peaks[1] - peaks[0]) / max(1, more - few)
    fitting = [n for n in range(1, share + 1) if share % n == 0 and peaks[1] + each * (n - more) <= free]
    return least(max(fitting, default=1), engine.device)


def _passes(engine: Engine, batch: Batch) -> None:
    for _ in range(PASSES):
        _pass(engine, batch)


def _pass(engine: Engine, batch: Batch) -> None:
    """Runs a step whose gradient isn't finite, so that DeepSpeed discards it; then resets DeepSpeed's counters."""
    deepspeed = engine.deepspeed
    with keeping_counters(deepspeed):
        deepspeed.set_gradient_accumulation_boundary(True)
        losses = engine.training_losses(batch)
        loss = torch.stack([values.sum() for name, values in losses.items() if name not in PARTS]).sum()
        deepspeed.backward(loss * float("nan"), scale_wrt_gas=False)
        deepspeed.step()


def _full_rows(run: ValidatedRun, count: int) -> Batch:
    """`count` rows of the run, padded to the greatest width that their objective allows."""
    inputs, targets = run.lengths
    batch = TrainingBatches(run.stream, run.layout(count))[0].batch
    ids = batch["encoder_input_ids"]
    batch.setdefault("encoder_attention_mask", torch.ones_like(ids))
    return {name: _widened(name, tensor, inputs, targets) for name, tensor in batch.items()}


def _widened(name: str, tensor: torch.Tensor, inputs: int, targets: int) -> torch.Tensor:
    if tensor.dim() == 1:
        return tensor
    width = targets if name in LABELS or name.startswith("decoder") else inputs
    return F.pad(tensor, (0, max(0, width - tensor.size(1))), value=IGNORE_INDEX if name in LABELS else 0)


def _first(batch: Batch, count: int) -> Batch:
    return {name: tensor[:count] for name, tensor in batch.items()}


def _moments_to_come(engine: Engine) -> int:
    """Bytes of optimizer state that the first step will allocate."""
    if optimizer_state(engine.deepspeed):
        return 0
    average = 0 if engine.config.optimizer.ema_decay is None else _AVERAGE
    return (_MOMENTS + average) * sum(fragment.size for fragment in fragments(engine.deepspeed))
