"""What does the engine add to a step?

    python benchmarks/engine_overhead.py [--precision bf16 fp32] [--rows 8] [--stages 1 2 3]

A T5 of 12 million parameters takes steps of AdamW on rows of 128 inputs and 32 targets, under
the engine, with DeepSpeed at each ZeRO stage and one rank, and in a plain loop: forward, backward, clipping, PyTorch's
fused AdamW. In bf16 the plain loop keeps fp32 master weights as the engine does: it copies gradients to them, and
weights back.
"""

import argparse
import os
from collections.abc import Iterator
from itertools import product

import torch
from harness import Options, Side, Table, compare, main
from torch import Tensor, nn

from pretrain import models
from pretrain.config import RunConfig
from pretrain.engine.sharding import Sharding

LIMIT = """The engine copies each gradient into a flat fp32 tensor, and takes the norm in fp64, which for 12 million
elements takes 8 ms longer than the loop's in fp32. DeepSpeed's hooks are Python, for each parameter. All this is the
same for any number of rows, so that its share falls with the work of a step. In bf16 the loop copies gradients and
weights too. One rank at stage 3 keeps all weights whole. Several, which this doesn't measure, fetch and release those
of each module, forward and backward, in Python."""
MODEL = {
    "family": "t5", "vocab_size": 8192, "d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 704,
    "num_encoder_layers": 4, "num_decoder_layers": 4,
}  # fmt: skip
INPUTS, TARGETS = 128, 32


def run_config(precision: str, rows: int, stage: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "overhead", "directory": "run", "max_steps": 1000},
            "model": MODEL,
            "data": {"train": [{"corpus": "none"}]},
            "batch": {"global_batch_size": rows},
            "optimizer": {"name": "adamw", "learning_rate": 1e-4},
            "schedule": {"name": "constant"},
            "precision": precision,
            "compute": {"compile": False},
            "deepspeed": {"zero_optimization": {"stage": stage}},
        }
    )


def under_the_engine(config: RunConfig, batch: dict[str, Tensor]) -> Side:
    from pretrain.engine.construction import construct
    from pretrain.engine.engine import Engine

    rows, sharding = len(batch["labels"]), Sharding.of(config, ranks=1)
    engine = Engine.initialize(construct(config, config.model, sharding), config, sharding)
    number = iter(range(1, 1 << 30))
    return lambda: engine.step(step := next(number), [step * rows], [batch])


def plain(config: RunConfig, batch: dict[str, Tensor]) -> Side:
    model = models.build(config.model).train()
    master_weights = [nn.Parameter(weight.detach().clone()) for weight in model.parameters()]
    if config.precision == "bf16":
        model.to(torch.bfloat16)
    else:
        master_weights = list(model.parameters())
    optimizer = torch.optim.AdamW(master_weights, lr=1e-4, weight_decay=0.0, fused=True)

    def step() -> float:
        loss = model(**batch)["labels"].mean()
        loss.backward()
        if config.precision == "bf16":
            for weight, master in zip(model.parameters(), master_weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(master_weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if config.precision == "bf16":
            with torch.no_grad():
                for weight, master in zip(model.parameters(), master_weights, strict=True):
                    weight.copy_(master)
        return loss.item()

    return step


def measure(options: Options) -> Iterator[Table]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29533")
    from pretrain.engine.ranks import process_group

    table = Table("The engine", ["stage", "rows", "dtype", "engine", "plain loop", "the engine adds"])
    with process_group(1, 600.0):
        for precision in options.precisions:
            for stage, rows in product(options.arguments.stages, options.arguments.rows):
                config = run_config(precision, rows, stage)
                generator = torch.Generator().manual_seed(0)
                batch = {
                    name: torch.randint(2, 8000, (rows, length), generator=generator)
                    for name, length in (("encoder_input_ids", INPUTS), ("labels", TARGETS))
                }
                sides = {"engine": under_the_engine(config, batch), "plain loop": plain(config, batch)}
                result = compare(sides, options)
                added = 1 / result.ratio("plain loop") - 1
                table.add(stage, rows, precision, result.ours, result["plain loop"], f"{added:+.1%}", **result.data)
    yield table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
