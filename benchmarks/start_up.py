"""How long until `launch local` has taken its first step?

    python benchmarks/start_up.py [--ranks 2] [--times 3]

A small T5 on the shipped text, from the command to the first line of the log of metrics, and to the end of a run of one
step; then the same command again, which finds the run finished. Each is a fresh process; the median of several.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT, Options, Table, main

LIMIT = """Almost all of it is imports, which each rank repeats: PyTorch, DeepSpeed and what these import. They are
bound by the processor once the files are in the page cache."""
MODEL = {
    "family": "t5", "vocab_size": None, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128,
    "num_encoder_layers": 2, "num_decoder_layers": 2,
}  # fmt: skip


def measure(options: Options) -> Iterator[Table]:
    ranks, times = options.arguments.ranks, options.arguments.times
    table = Table("Start-up", ["ranks", "to the first step", "to the end", "when it is finished"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command("data_pipeline", "build", ROOT / "configs/corpora/reversal.yaml", f"output={folder / 'corpus'}")
        taken: list[tuple[float, float, float]] = []
        for number in range(times):
            path = run_file(folder, number)
            first, whole = timed(path, ranks, folder / f"run-{number}/metrics.jsonl")
            taken.append((first, whole, timed(path, ranks)[1]))
        medians = [statistics.median(column) for column in zip(*taken, strict=True)]
        table.add(ranks, *(f"{seconds:.1f} s" for seconds in medians), seconds=taken)
    yield table


def run_file(folder: Path, number: int) -> Path:
    path = folder / f"run-{number}.yaml"
    config = {
        "run": {"name": "start", "directory": str(folder / f"run-{number}"), "max_steps": 1},
        "model": MODEL,
        "data": {"train": [{"corpus": str(folder / "corpus")}]},
        "batch": {"global_batch_size": 8},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        "tracking": {"mlflow": None, "log_every_steps": 1},
    }
    path.write_text(json.dumps(config))
    return path


def timed(path: Path, ranks: int, first: Path | None = None) -> tuple[float, float]:
    """Seconds until the file `first` has a line, and until the command ends."""
    program = [sys.executable, "-m", "launch", "local", str(path), "--ranks", str(ranks)]
    started, seen = time.perf_counter(), 0.0
    process = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None:
        if first and not seen and first.exists() and first.stat().st_size:
            seen = time.perf_counter() - started
        time.sleep(0.02)
    whole = time.perf_counter() - started
    if process.returncode:
        assert process.stdout is not None
        raise SystemExit(f"{' '.join(program)}\n{process.stdout.read()[-4000:]}")
    return seen or whole, whole


def command(module: str, *arguments: str | Path) -> None:
    program = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(program)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=3)


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
