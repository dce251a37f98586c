"""What a teacher is worth to a smaller encoder-decoder: runs with and without `wrapper: {name: distillation}`.

    python -m checks.distillation FOLDER > docs/results/models/distillation.csv

The teacher is the model that `checks.new_vocabulary` trains in FOLDER, the quickstart's. The student has half its width
and 200 steps on the same rows. Held-out losses are in nats per target, without a teacher in any case: the mean and the
standard deviation of three seeds, which decide the first weights and the order of the rows.
"""

import csv
import statistics
import sys
from pathlib import Path

from checks.new_vocabulary import CONFIGS, command
from pretrain.run.metrics_file import read_metrics

STUDENT = ["model.d_model=64", "model.d_ff=128", "model.num_heads=2", "model.num_key_value_heads=2"]
STEPS, SEEDS = 200, range(3)
WAYS = {
    "no teacher": None,
    "teacher, weight 0.5": {"weight": 0.5},
}


def held_out(run: Path, corpus: Path, *overrides: str) -> float:
    if not (run / "metrics.jsonl").exists():
        command(
            *("pretrain", "train", CONFIGS / "runs/quickstart.yaml", f"run.directory={run}"),
            *(f"data.train=[{{corpus: {corpus}}}]", f"data.validation=[{{corpus: {corpus}}}]", "data.curriculum=[]"),
            *(f"run.max_steps={STEPS}", f"evaluation=[{{hook: validation_loss, every_steps: {STEPS}}}]"),
            *("tracking.mlflow=null", *STUDENT, *overrides),
        )
    name = "validation/quickstart/loss"
    return [row.metrics[name] for row in read_metrics(run) if name in row.metrics][-1]


def main(folder: Path) -> None:
    corpus, teacher = folder / "quickstart", folder / "model"
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(("training", f"held-out loss after {STEPS} steps", "each seed"))
    for name, settings in WAYS.items():
        keys = {"name": "distillation", "teacher": str(teacher), **(settings or {})}
        wrapper = ", ".join(f"{key}: {value}" for key, value in keys.items())
        given = [] if settings is None else [f"wrapper={{{wrapper}}}"]
        losses = []
        for seed in SEEDS:
            run = folder / f"{'-'.join(name.replace(',', '').split())}-{seed}"
            losses.append(held_out(run, corpus, f"run.seed={seed}", *given))
            print(name, seed, losses[-1], file=sys.stderr, flush=True)
        spread = f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}"
        table.writerow((name, spread, ", ".join(f"{loss:.3f}" for loss in losses)))
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
