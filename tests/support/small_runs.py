"""Small models under the engine without a corpus, for tests that run on ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from data_pipeline.base.config_file import check
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import Batch
from pretrain.config import RunConfig
from pretrain.engine.sharding import Sharding

T5 = {
    "family": "t5",
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "dropout_rate": 0.0,
}


def run_config(
    stage: int = 2, model: dict[str, Any] | None = None, zero: dict[str, Any] | None = None, **changes: Any
) -> RunConfig:
    """The run file of a small T5 with `model` changed, or of another family if `model` names one.

    `zero` has settings of `zero_optimization` besides `stage`.
    """
    values = {
        "run": {"name": "test", "directory": "run", "max_steps": 100},
        "model": model if model and "family" in model else {**T5, **(model or {})},
        "data": {"train": [{"corpus": "none"}]},
        "batch": {"global_batch_size": 8},
        "optimizer": {"learning_rate": 1e-2, "gradient_clipping": 0.5, "weight_decay": 0.1},
        "schedule": {"name": "constant"},
        "precision": "fp32",
        "deepspeed": {"zero_optimization": {"stage": stage, **(zero or {})}},
        **changes,
    }
    return check(values, RunConfig, "run.yaml")


def engine_of(config: RunConfig, warn: Callable[[str], None] = print) -> Any:
    """The engine of a model of random weights, as a run constructs it on a rank that has joined."""
    from pretrain.engine.construction import construct  # DeepSpeed asks the rank's environment for its device
    from pretrain.engine.engine import Engine

    sharding = own_sharding(config)
    return Engine.initialize(construct(config, config.model, sharding), config, sharding, warn=warn)


def own_sharding(config: RunConfig) -> Sharding:
    """How the process group shards a run."""
    return Sharding.of(config, dist.get_world_size())


def own_layout(micro_batch: int = 2) -> BatchLayout:
    """Two micro-batches per step on each rank of the process group."""
    return BatchLayout(dist.get_rank(), dist.get_world_size(), micro_batch, 2)


def micro_batches(
    layout: BatchLayout, step: int, inputs: int = 16, targets: int = 8, vocabulary: int = 100
) -> list[Batch]:
    """This rank's share of a step's rows. The rows don't depend on the layout, and every other step has padding."""
    generator = torch.Generator().manual_seed(step)
    rows_of_step = layout.rows(layout.accumulation)
    ids = torch.randint(3, vocabulary, (rows_of_step, inputs), generator=generator)
    labels = torch.randint(3, vocabulary, (rows_of_step, targets), generator=generator)
    rows = {"encoder_input_ids": ids, "labels": labels}
    if step % 2:
        rows["encoder_attention_mask"] = torch.ones_like(ids)
        rows["encoder_attention_mask"][::3, inputs // 2 :] = 0
        labels[::3, targets // 2 :] = -100
    return own_rows(layout, rows)


def row_offsets(layout: BatchLayout, step: int) -> list[int]:
    """The positions of the first rows of this rank's micro-batches of a step."""
    return layout.row_offsets(step * layout.rows(layout.accumulation), layout.accumulation)


def own_rows(layout: BatchLayout, rows: Batch) -> list[Batch]:
    """A rank's micro-batches of the rows of a step."""
    return [
        {name: tensor[first : first + layout.micro_batch] for name, tensor in rows.items()}
        for first in row_offsets(layout, 0)
    ]


def flip(values: torch.Tensor, element: int, bit: int) -> None:
    integers = values.view(-1)[element : element + 1].view(torch.uint8)
    integers[bit // 8] ^= 1 << bit % 8


def trained(steps: int) -> list[float]:
    """The losses of some steps on the ranks that have joined."""
    engine, layout = engine_of(run_config(2)), own_layout()
    losses = [engine.step(step, row_offsets(layout, step), micro_batches(layout, step)).loss for step in range(steps)]
    engine.close()
    return losses
