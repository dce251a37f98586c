"""What share of a run do all evaluation hooks take, at their default periods?

    python benchmarks/hooks_cost.py [--corpus DIR] [--rows 32] [--evaluations 2]

Trains a T5 v1.1 of about 10 M parameters on one thread with every hook that a corpus of plain text allows, each with
its default settings but for its period: four steps, so that evaluations and steps alternate under the same load. A
hook's share at its default period is its median seconds over the seconds of that many median steps. The norms' seconds
include what a measured step takes longer than the others. Drawing and writing pictures count, and so do uploads to
MLflow, which a thread of the same process makes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from learning import command

from pretrain.config.evaluation import HOOKS, HookSettings
from pretrain.run.metrics_file import Row, read_metrics

ROOT = Path(__file__).parent.parent
EVERY = 4
MODEL = {
    "family": "t5",
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 704,
    "num_heads": 4,
    "num_encoder_layers": 4,
    "num_decoder_layers": 4,
    "dropout_rate": 0.0,
}


def chosen() -> list[HookSettings]:
    """The hooks that need nothing but a corpus of plain text, with their defaults: not `text_to_text`, whose time
    depends on the task."""
    free = [one for one in HOOKS.values() if not any(field.is_required() for field in one.model_fields.values())]
    return [settings.model_validate({}) for settings in free if settings is not HOOKS["text_to_text"]]


def run(folder: Path, corpus: Path, rows: int, evaluations: int) -> list[Row]:
    """Trains; returns the rows of metrics.jsonl."""
    config = {
        "extends": [str(ROOT / "configs/runs/quickstart.yaml")],
        "run": {"name": "hooks", "directory": str(folder / "run"), "max_steps": EVERY * evaluations},
        "model": MODEL,
        "data": {"train": [{"corpus": str(corpus)}], "validation": [{"corpus": str(corpus)}]},
        "batch": {"global_batch_size": rows, "micro_batch_size": min(rows, 16)},
        "checkpoint": {"every_steps": 10**6},
        "evaluation": [{**one.model_dump(), "every_steps": EVERY, "budget_seconds": None} for one in chosen()],
        "tracking": {"mlflow": {"uri": f"sqlite:///{folder}/mlflow.db", "experiment": "hooks"}, "log_every_steps": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "pretrain", "train", str(folder / "run.yaml")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    if done.returncode or "warning" in done.stdout:
        raise SystemExit(done.stdout + done.stderr)
    print(done.stdout.splitlines()[0])
    return read_metrics(folder / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="a finished corpus; default: the quickstart's is built")
    parser.add_argument("--rows", type=int, default=32, help="of a global batch")
    parser.add_argument("--evaluations", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, corpus = Path(name), arguments.corpus
        if corpus is None:
            corpus = folder / "corpus"
            command("data-pipeline", "build", ROOT / "configs/corpora/quickstart.yaml", f"output={corpus}")
        found = run(folder, corpus.absolute(), arguments.rows, arguments.evaluations)
        held_out = json.loads((corpus / "manifest.json").read_text())["splits"]["validation"]["rows"]
    steps = {row.step: 1 / row.metrics["train/steps_per_second"] for row in found if "train/loss" in row.metrics}
    measured = statistics.median(seconds for step, seconds in steps.items() if step % EVERY == 0)
    usual = statistics.median(seconds for step, seconds in steps.items() if step % EVERY and step > 1)
    print(f"a step of {arguments.rows} rows: {usual:.2f} s; {held_out} held-out rows; load {os.getloadavg()[0]:.0f}\n")
    print("| hook | seconds | every | share of the run |\n|---|---:|---:|---:|")
    total = 0.0
    for settings in chosen():
        key = f"evaluation/{settings.hook}/seconds"
        seconds = statistics.median(row.metrics[key] for row in found if key in row.metrics)
        if settings.hook == "norms":
            seconds += max(measured - usual, 0.0)
        share = seconds / (settings.every_steps * usual)
        total += share
        print(f"| `{settings.hook}` | {seconds:.2f} | {settings.every_steps:,} | {share:.2%} |")
    print(f"| all | | | {total:.2%} |")


if __name__ == "__main__":
    main()
