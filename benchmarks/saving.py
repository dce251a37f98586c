"""How long does a checkpoint pause training, and how long until it is on disk?

    python benchmarks/saving.py [--ranks 2] [--precision bf16]

Trains T5 v1.1 base (248 million parameters, AdamW) on the shipped text at each ZeRO stage: three steps of one row on
each rank, with a checkpoint after each step. On CPU ranks, the copy to host memory is a copy within host memory. Needs
12 GB of memory and 9 GB of disk.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

from learning import command

from pretrain.metrics.log import read_metrics

ROOT = Path(__file__).parent.parent
STEPS = 3


def run_file(folder: Path, corpus: Path, stage: int, ranks: int, precision: str) -> Path:
    path = folder / f"stage-{stage}.yaml"
    config = {
        "extends": [str(ROOT / "configs/models/t5-v1.1-base.yaml")],
        "run": {"name": "saving", "directory": str(folder / f"stage-{stage}"), "max_steps": STEPS},
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command("data-pipeline", "build", ROOT / "configs/corpora/quickstart.yaml", f"output={folder / 'corpus'}")
        print(f"{'stage':>5} {'GB':>6} {'stood still, s':>15} {'on disk after, s':>17}   medians of {STEPS} saves")
        for stage in (1, 2, 3):
            path = run_file(folder, folder / "corpus", stage, arguments.ranks, arguments.precision)
            command("launch", "local", path, "--ranks", str(arguments.ranks))
            saves = [row.metrics for row in read_metrics(folder / f"stage-{stage}")]
            stall, write, size = (
                statistics.median(save[f"checkpoint/{key}"] for save in saves if f"checkpoint/{key}" in save)
                for key in ("stall_seconds", "write_seconds", "gigabytes")
            )
            print(f"{stage:5} {size:6.2f} {stall:15.2f} {write:17.2f}", flush=True)
            shutil.rmtree(folder / f"stage-{stage}")


if __name__ == "__main__":
    main()
