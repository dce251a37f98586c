"""What a model keeps when it gets another vocabulary: `pretrain adapt --tokenizer` beside a fresh model.

    python -m checks.new_vocabulary FOLDER > docs/results/models/new-vocabulary.csv

In FOLDER, this builds the quickstart's corpus with its own vocabulary and two others, trains the quickstart's model
unless that is there, and prints a table of held-out losses in nats per masked character: of the model in its own
vocabulary, of the adapted models before they train, and of adapted and fresh models after 50 steps, as the mean and the
standard deviation of three seeds. Seeds decide the order of the rows, fresh weights and drawn rows.
"""

import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import data_pipeline
from pretrain.run.metrics_file import read_metrics

CONFIGS = Path(__file__).parents[1] / "configs"
OTHERS = {
    "sentencepiece, 4,000 tokens": ["tokenizer.vocab_size=4000"],
    "byte-level BPE, 2,000 tokens": ["tokenizer.kind=bpe", "tokenizer.vocab_size=2000"],
}
STEPS, SEEDS = 50, range(3)
SCHEDULE = ["schedule.warmup_steps=5", f"run.max_steps={STEPS}", "data.curriculum=[]", "checkpoint.every_steps=1000"]
HEADINGS = (
    *("vocabulary", "rows kept", "means", "drawn", "the model in its own vocabulary", "adapted, before training"),
    *(f"adapted, after {STEPS} steps", f"with drawn rows, after {STEPS} steps", f"fresh, after {STEPS} steps"),
)


def command(module: str, *arguments: object) -> str:
    """What a command prints; its progress goes to stderr."""
    program = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    if done.returncode:
        sys.exit(f"{' '.join(program)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def trained(run: Path, corpus: Path, *overrides: object) -> float:
    """The held-out loss in nats per masked character after a run's last step."""
    data = [f"data.train=[{{corpus: {corpus}}}]", f"data.validation=[{{corpus: {corpus}}}]"]
    given = [f"run.directory={run}", *data, "tracking.mlflow=null", *overrides]
    if not (run / "metrics.jsonl").exists():
        command("pretrain", "train", CONFIGS / "runs/quickstart.yaml", *given)
    name = f"validation/{data_pipeline.open(corpus).name}/loss"
    return [row.metrics[name] for row in read_metrics(run) if name in row.metrics][-1] * tokens_per_character(corpus)


def tokens_per_character(corpus: Path) -> float:
    """Target tokens, sentinels and EOS included, for each masked character of the held-out rows."""
    opened = data_pipeline.open(corpus)
    content = opened.tokenizer.model.token_bytes
    tokens = characters = 0
    for example in opened.examples("validation"):
        tokens += len(example.targets)
        masked = b"".join(content[id_] for id_ in example.targets if id_ < len(content))
        characters += len(masked.decode(errors="ignore"))
    return tokens / characters


def row(folder: Path, name: str, overrides: list[str], model: Path, own: float) -> list[str]:
    corpus = folder / "-".join(name.replace(",", "").split())
    if not (corpus / "manifest.json").exists():
        command("data_pipeline", "build", CONFIGS / "corpora/quickstart.yaml", f"output={corpus}", *overrides)
    losses: dict[str, list[float]] = {"mean": [], "random": [], "fresh": []}
    kept = means = drawn = 0
    before = 0.0
    for seed, way in itertools.product(SEEDS, losses):
        run, start = folder / f"{corpus.name}-{way}-{seed}", folder / f"{corpus.name}-{way}-{seed}-start"
        init = []
        if way != "fresh":
            if not start.exists():
                told = command(
                    "pretrain", "adapt", model, start, "--tokenizer", corpus, "--new-rows", way, "--seed", seed
                )
                start.with_suffix(".txt").write_text(told)
            lines = [line.split(maxsplit=1) for line in start.with_suffix(".txt").read_text().splitlines()[1:-2]]
            if way == "mean" and seed == 0:
                kept, means, drawn = (
                    sum(int(count.replace(",", "")) for count, meaning in lines if meaning.startswith(word))
                    for word in ("kept", "the mean", "drawn")
                )
                before = evaluated(start, corpus)
            init = [f"checkpoint.init_from={start}"]
        hooks = f"evaluation=[{{hook: validation_loss, every_steps: {STEPS}}}]"
        losses[way].append(trained(run, corpus, *SCHEDULE, f"run.seed={seed}", hooks, *init))
        print(name, way, seed, losses[way][-1], file=sys.stderr, flush=True)
    spread = (f"{statistics.mean(found):.3f} ± {statistics.stdev(found):.3f}" for found in losses.values())
    return [name, f"{kept:,}", f"{means:,}", f"{drawn:,}", f"{own:.2f}", f"{before:.2f}", *spread]


def evaluated(checkpoint: Path, corpus: Path) -> float:
    found = json.loads(command("pretrain", "evaluate", checkpoint, "--corpus", corpus, "--json"))
    (loss,) = (value for name, value in found.items() if name.endswith("/loss"))
    return loss * tokens_per_character(corpus)


def main(folder: Path) -> None:
    corpus, model = folder / "quickstart", folder / "model"
    if not (corpus / "manifest.json").exists():
        command("data_pipeline", "build", CONFIGS / "corpora/quickstart.yaml", f"output={corpus}")
    own = trained(model, corpus)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(HEADINGS)
    for name, overrides in OTHERS.items():
        table.writerow(row(folder, name, overrides, model, own))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
