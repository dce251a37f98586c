"""Measures how the loss and gradient of a global batch differ from a plain loop's, however the batch is layout.

    python -m tests.pretrain.splits

A small T5 takes three steps of 8 rows with 0 to 10 targets, clipped, on 1, 2 and 4 ranks in one micro-batch or two, at
each ZeRO stage. The plain loop, without DeepSpeed, takes whole batches in one process.
"""

from typing import Any

import torch
import torch.distributed as dist

from data_pipeline.loading.batch_layout import BatchLayout
from pretrain import models
from pretrain.config import RunConfig
from pretrain.models import T5Config
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.small_runs import own_rows

RANKS = (1, 2, 4)
MODEL = T5Config(
    vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_encoder_layers=1, num_decoder_layers=1, z_loss=1e-4
)
ROWS, INPUTS, TARGETS = 8, 12, 10


def config(stage: int, precision: str = "fp32", **optimizer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "directory": "run", "max_steps": 10},
            "model": MODEL.model_dump(),
            "data": {"train": [{"corpus": "none"}]},
            "batch": {"global_batch_size": ROWS},
            "optimizer": {"name": "adamw", "learning_rate": 1e-2, "gradient_clipping": 0.5, **optimizer},
            "schedule": {"name": "constant"},
            "precision": precision,
            "deepspeed": {"zero_optimization": {"stage": stage}},
        }
    )


def global_batch(step: int) -> dict[str, torch.Tensor]:
    """8 rows; the targets of one are empty, those of the others have 1 to 10 tokens."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(2, 96, (ROWS, INPUTS), generator=generator)
    labels = torch.randint(2, 96, (ROWS, TARGETS), generator=generator)
    lengths = torch.tensor([1, 10, 3, 0, 7, 2, 10, 5])[torch.randperm(ROWS, generator=generator)]
    return {"encoder_input_ids": inputs, "labels": labels.masked_fill(torch.arange(TARGETS) >= lengths[:, None], -100)}


def micro_batches(layout: BatchLayout, step: int) -> list[dict[str, torch.Tensor]]:
    return own_rows(layout, global_batch(step))


def engine_of(settings: RunConfig, dropout_rate: float = 0.0):
    from pretrain.zero.engine import Engine

    torch.manual_seed(0)
    return Engine(models.build(MODEL.model_copy(update={"dropout_rate": dropout_rate})), settings)


CASES = [(stage, accumulation, 0.0) for stage in (1, 2, 3) for accumulation in (1, 2)]


def train_cuts() -> dict[Any, list[dict[str, Any]]]:
    """Loss, norm and gradient of each of three steps, by (stage, accumulation, dropout rate)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with_dropout = (2, 4 // ranks, 0.3)  # micro-batches of two rows
    return {
        case: train_cut(BatchLayout(rank, ranks, ROWS // ranks // case[1], case[1]), *case)
        for case in [*CASES, with_dropout]
    }


def train_cut(layout: BatchLayout, stage: int, accumulation: int, dropout_rate: float) -> list[dict[str, Any]]:
    from deepspeed.utils import safe_get_full_grad

    engine = engine_of(config(stage), dropout_rate)
    gradients: dict[str, torch.Tensor] = {}
    take_step = engine.deepspeed.step

    def step_and_tell() -> None:
        if engine.deepspeed.is_gradient_accumulation_boundary():
            for name, parameter in engine.deepspeed.module.named_parameters():
                gradients[name] = safe_get_full_grad(parameter).to("cpu", copy=True)
        take_step()

    engine.deepspeed.step = step_and_tell
    told = []
    for step in range(3):
        outcome = engine.step(step, step * ROWS, micro_batches(layout, step))
        told.append({"loss": outcome.loss, "norm": engine.take_metrics()["train/gradient_norm"], **gradients})
    engine.close()
    return told


def train_plainly(device: str = "cpu") -> list[dict[str, Any]]:
    """Trains on whole batches in one process: the mean over the valid targets, by autograd."""
    torch.manual_seed(0)
    model = models.build(MODEL).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    told = []
    for step in range(3):
        rows = {name: tensor.to(device) for name, tensor in global_batch(step).items()}
        optimizer.zero_grad()
        loss = model(**rows)["labels"].sum() / (rows["labels"] != -100).sum()
        loss.backward()
        gradients = {name: parameter.grad.to("cpu", copy=True) for name, parameter in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        told.append({"loss": loss.item(), "norm": float(norm), **gradients})
    return told


def differences(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> tuple[float, float, float]:
    """The largest relative differences of a loss, a norm, and a tensor's gradient (L2), over all steps."""
    pairs = list(zip(found, wanted, strict=True))
    losses, norms = (max(abs(one[key] / other[key] - 1) for one, other in pairs) for key in ("loss", "norm"))
    gradients = [
        (one[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        for one, other in pairs
        for name, gradient in other.items()
        if name not in ("loss", "norm")
    ]
    return losses, norms, torch.stack(gradients).max().item()


def main() -> None:
    wanted = train_plainly()
    print(f"{'ranks':>5} {'micro-batches':>14} {'rows each':>10} {'stage':>6} {'loss':>9} {'norm':>9} {'gradient':>9}")
    for ranks in RANKS:
        found = on_ranks(ranks, train_cuts)[0]
        for stage, accumulation, dropout in CASES:
            figures = differences(found[stage, accumulation, dropout], wanted)
            rows = ROWS // ranks // accumulation
            print(f"{ranks:5} {accumulation:14} {rows:10} {stage:6} " + " ".join(f"{one:9.1e}" for one in figures))


if __name__ == "__main__":
    main()
