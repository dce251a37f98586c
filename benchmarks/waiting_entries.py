"""How much does it cost to train, generate and evaluate beside other programs, with and without the limit of spinning?

    python benchmarks/waiting_entries.py [--csv FILE] [--rounds 1]

`pretrain train` and `pretrain.train` train a small T5Gemma 2 on the shipped text, `pretrain generate` and `pretrain
evaluate` use it, each in a process of its own on all cores, beside no other process, one, and two that keep a core busy
each. "without" has the count of libgomp's own, "with" the one that `import pretrain` sets. The two follow one
another, in turns. Of training: tokens/s, the median of its steps after the first two; of the others: seconds of the
whole command. A turn ends after 30 seconds, which then count.
"""

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import ROOT
from start_up import command
from waiting_threads import BUSY, BUSY_LOOP

SPINS = "GOMP_SPINCOUNT"
WAYS = {"without": {SPINS: "300000"}, "with": {}}  # libgomp's count where no variable is set
STEPS, TEXTS = 6, 24  # of a turn
MODEL = {
    "family": "t5gemma2", "num_layers": 4, "d_model": 128, "d_ff": 512, "num_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip
LONGEST, MINUTES = 30.0, 6.5  # seconds of a turn; minutes after which no other turn begins
TRAINING = ("pretrain train", "pretrain.train")
PROGRAMS = {
    "pretrain train": ["-m", "pretrain", "train", "{run}", "run.directory={new}"],
    "pretrain.train": ["-c", "import pretrain; pretrain.train('{run}', run={{'directory': '{new}'}})"],
    "generate": ["-m", "pretrain", "generate", "{trained}", "--file", "{texts}", "--max-new-tokens", "64"],
    "evaluate": ["-m", "pretrain", "evaluate", "{trained}", "--hook", "validation_loss"],
}


def prepare(folder: Path) -> dict[str, str]:
    """The files that the programs use, by name."""
    command("data_pipeline", "build", "configs:corpora/quickstart.yaml", f"output={folder / 'corpus'}")
    corpus = {"corpus": str(folder / "corpus")}
    config: dict[str, Any] = {
        "run": {"name": "waiting", "directory": str(folder / "trained"), "max_steps": STEPS},
        "model": MODEL,
        "data": {"train": [corpus], "validation": [corpus], "workers": 0},
        "batch": {"global_batch_size": 32, "micro_batch_size": 32},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "precision": "fp32",
        "tracking": {"mlflow": None, "log_every_steps": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    command("pretrain", "train", str(folder / "run.yaml"))
    texts = [f"The {number}th <extra_id_0> of the <extra_id_1>." for number in range(TEXTS)]
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    return {
        name: str(folder / file) for name, file in (("run", "run.yaml"), ("trained", "trained"), ("texts", "texts.txt"))
    }


def turn(program: str, way: str, files: dict[str, str]) -> float:
    """Tokens/s of a program that trains, seconds of another one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, "run")
        words = [word.format(**files, new=new) for word in PROGRAMS[program]]
        began = time.perf_counter()
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, *words], cwd=ROOT, env={**kept, **WAYS[way]}, capture_output=True, timeout=LONGEST,
                check=True,
            )  # fmt: skip
        taken = time.perf_counter() - began
        if program not in TRAINING:
            return taken
        metrics = new / "metrics.jsonl"
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        rows = [json.loads(line)["metrics"] for line in lines]
        rates = [row["train/tokens_per_second"] for row in rows if "train/tokens_per_second" in row]
        return statistics.median(rates[2:] or rates or [0.0])


def measure(rounds: int, files: dict[str, str]) -> list[tuple[int, int, str, str, float]]:
    """(round, busy processes, program, way, figure)."""
    end, found = time.monotonic() + 60 * MINUTES, list[tuple[int, int, str, str, float]]()
    for number in range(rounds):
        for beside in BUSY:
            for place, program in enumerate(PROGRAMS):
                for way in list(WAYS)[:: 1 if (number + place) % 2 == 0 else -1]:
                    if time.monotonic() > end:
                        return found
                    busy = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(beside)]
                    try:
                        found.append(row := (number, beside, program, way, turn(program, way, files)))
                    finally:
                        for process in busy:
                            process.kill()
                            process.wait()
                    print(f"round {number + 1}, {beside} busy, {program}, {way}: {row[-1]:,.1f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--csv", type=Path, default=Path("waiting_entries.csv"), help="where each turn is written")
    given = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.rounds, prepare(Path(folder)))
    with given.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("round", "busy processes", "program", "limit", "figure"))
        writer.writerows((*row[:-1], f"{row[-1]:.2f}") for row in found)
    figures = defaultdict(list)
    for _, beside, program, way, figure in found:
        figures[beside, program, way].append(figure)
    print(f"{'busy':>4}  {'program':15}  {'unit':8}  {'without':>9}  {'with':>9}  {'times as fast':>13}")
    for beside, program in dict.fromkeys(key[:2] for key in figures):
        without, limited = (statistics.median(figures.get((beside, program, way), [float("nan")])) for way in WAYS)
        unit, slow, fast = ("tokens/s", without, limited) if program in TRAINING else ("s", limited, without)
        faster = fast / slow if slow else float("inf")
        print(f"{beside:>4}  {program:15}  {unit:8}  {without:>9,.1f}  {limited:>9,.1f}  {faster:>13.2f}")


if __name__ == "__main__":
    main()
