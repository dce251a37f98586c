"""Writes docs/results/loss-curves/curves.csv: the curves of the runs of two experiments.

    python benchmarks/loss_curves/collect.py runs/loss-curves runs/loss-curves-faults

A line has the run's row, objective, fault (nothing in the first experiment), seed, step, the name of a value and the
value, in nats but for the accuracy. `uniform` is ln of the number of tokens. Names that begin with `whole_` are of the
held-out rows without the fault.
"""

import csv
import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.base.atomic import write_bytes
from data_pipeline.base.config_file import load
from data_pipeline.corpus import Corpus, open_corpus
from pretrain.config import RunConfig
from pretrain.run.metrics_file import read_metrics

OUT = Path(__file__).parents[2] / "docs/results/loss-curves/curves.csv"
HEADINGS = ["run", "objective", "fault", "seed", "step", "name", "value"]
NAMES = {
    "train/loss": "train_loss",
    "validation/loss": "validation_loss",
    "validation/text_loss": "text_loss",
    "validation/unigram_entropy": "unigram_entropy",
    "validation/accuracy": "accuracy",
    "input_use/loss": "right_input_loss",
    "input_use/no_input_loss": "no_input_loss",
    "input_use/worth": "worth",
    "input_use/bigram_entropy": "bigram_entropy",
}
CONSTANT = {
    f"{of}{name}" for of in ("", "whole_") for name in ("unigram_entropy", "bigram_entropy")
}  # of the held-out rows and not of the model


def lines(experiment: Path, is_faulty: bool) -> Iterator[list[str]]:
    """The lines of the runs EXPERIMENT/ROW/seed-N."""
    for run in sorted(path.parent for path in experiment.glob("*/seed-*/metrics.jsonl")):
        config = load(run / "config.yaml", [], RunConfig)
        corpus: Corpus = open_corpus(config.data.validation[0].corpus).with_objective(config.data.objective)
        row = run.parent.name
        own = [row, corpus.objective.kind_of_batches, row if is_faulty else "", str(config.run.seed)]
        yield [*own, "0", "uniform", f"{math.log(corpus.tokenizer.vocab_size):.4f}"]
        known: set[str] = set()
        for line in read_metrics(run):
            for metric, value in line.metrics.items():
                kind, *rest = metric.split("/")
                name = NAMES.get(f"{kind}/{rest[-1]}")
                if name and rest[0] == "right":
                    name = f"whole_{name}"
                if name and name not in known and not math.isnan(value):
                    yield [*own, str(line.step), name, f"{value:.4f}"]
                    known |= {name} & CONSTANT


if __name__ == "__main__":
    normal, faulty = map(Path, sys.argv[1:])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([HEADINGS, *lines(normal, False), *lines(faulty, True)])
    write_bytes(OUT, text.getvalue().encode())
