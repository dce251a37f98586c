"""How long does a checkpoint pause training, and how long until it is on disk?

    python benchmarks/saving.py [--model t5-v1.1-base] [--ranks 2] [--precision bf16 fp32] [--stages 1 2 3]

Trains a T5 with AdamW on the shipped text: three steps of one row on each rank, with a checkpoint after each step.
The peer is `torch.save` of the same state, fp32 parameters and two moments, by one process to the same folder, without
waiting for the disk. On CPU ranks, the copy to host memory is a copy within host memory. T5-v1.1-base, of 248 million
parameters, needs 12 GB of memory and 9 GB of disk.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import ROOT, Options, Table, main
from peers import our_model
from start_up import command

from pretrain.run.metrics_file import read_metrics

LIMIT = """The copy is made beside the next forward and backward pass, so that training waits for what is left of it
when the optimizer steps; the write is bound by the disk."""
STEPS = 3


def run_file(folder: Path, corpus: Path, model: str, stage: int, ranks: int, precision: str) -> Path:
    path = folder / f"stage-{stage}-{precision}.yaml"
    config = {
        "extends": [str(ROOT / f"configs/models/{model}.yaml")],
        "run": {"name": "saving", "directory": str(folder / path.stem), "max_steps": STEPS},
        "model": {"family": "t5", "vocab_size": None, "pad_vocab_to_multiple_of": 32128},
        "data": {"train": [{"corpus": str(corpus)}], "workers": 0},
        "batch": {"global_batch_size": ranks},
        "optimizer": {"name": "adamw", "learning_rate": 1e-4},
        "precision": precision,
        "deepspeed": {"zero_optimization": {"stage": stage}},
        "checkpoint": {"every_steps": 1, "keep_last": 1},
        "tracking": {"mlflow": None},
    }
    path.write_text(json.dumps(config))
    return path


def by_torch(model: str, folder: Path) -> float:
    """Seconds of torch.save."""
    parameters = dict(our_model(model).named_parameters())
    state = {
        "model": {name: one.detach() for name, one in parameters.items()},
        **{moment: {name: torch.zeros_like(one) for name, one in parameters.items()} for moment in ("m", "v")},
    }
    taken = []
    for _ in range(STEPS):
        started = time.perf_counter()
        torch.save(state, folder / "state.pt")
        taken.append(time.perf_counter() - started)
    (folder / "state.pt").unlink()
    return statistics.median(taken)


def measure(options: Options) -> Iterator[Table]:
    given = options.arguments
    columns = ["stage", "dtype", "GB", "paused", "torch.save", "share", "on disk after"]
    table = Table(f"Checkpoints of {given.model} on {given.ranks} ranks, medians of {STEPS}", columns)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command("data_pipeline", "build", ROOT / "configs/corpora/quickstart.yaml", f"output={folder / 'corpus'}")
        plain = by_torch(given.model, folder)
        for precision in options.precisions:
            for stage in given.stages:
                path = run_file(folder, folder / "corpus", given.model, stage, given.ranks, precision)
                command("launch", "local", path, "--ranks", str(given.ranks))
                saves = [row.metrics for row in read_metrics(folder / path.stem)]
                stall, write, size = (
                    statistics.median(save[f"checkpoint/{key}"] for save in saves if f"checkpoint/{key}" in save)
                    for key in ("pause_seconds", "write_seconds", "gigabytes")
                )
                cells = [f"{size:.2f}", f"{stall:.2f} s", f"{plain:.2f} s", f"{stall / plain:.0%}", f"{write:.2f} s"]
                table.add(stage, precision, *cells, stall=stall, torch_save=plain, write=write, gigabytes=size)
                shutil.rmtree(folder / path.stem)
    yield table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="t5-v1.1-base")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
