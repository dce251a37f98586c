"""Where an exported model comes from: its run, corpora and losses. What is unknown is omitted, never guessed."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data_pipeline.corpus import Corpus, open_corpus
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.secrets import masked_values
from data_pipeline.objectives.objective import Objective
from pretrain import models
from pretrain.checkpoint import CONFIG
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.average import AVERAGE_OF
from pretrain.config import RunConfig
from pretrain.models.flops import Sizes, count_flops
from pretrain.run.metrics_file import read_metrics

_RESULTS = ("validation/", "text_to_text/", "lm_eval/")  # metrics of held-out texts, among those of a run
_SETTINGS = ("model", "batch", "optimizer", "schedule", "precision")  # without names and paths of the machines


@dataclass(frozen=True)
class TrainingCorpus:
    """A training corpus, the `rows` of it that the model has read, and the FLOPs of these at full length."""

    corpus: Corpus
    rows: int
    flops: float

    @property
    def tokens(self) -> float:
        """Tokens of text in the rows read."""
        split = self.corpus.manifest.splits["train"]
        return self.rows * split.tokens / split.rows


@dataclass(frozen=True)
class Lineage:
    """Where a checkpoint comes from. An imported model has no steps and no rows.

    - `average_of`: the checkpoints whose mean it is, if it is one.
    - `rows`: rows read.
    - `missing_corpora`: the number of training corpora that aren't there any more.
    - `curve`: (step, train/loss). `results`: metrics of held-out texts up to the checkpoint, by name.
    - `settings`: those of the run that shape the model, with defaults.
    - `objective`: the name of what it has learnt at last; None if that isn't known.
    """

    name: str | None = None
    average_of: str | None = None
    step: int = 0
    rows: int = 0
    corpora: list[TrainingCorpus] = field(default_factory=list)
    missing_corpora: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    objective: str | None = None

    @property
    def tokens(self) -> float | None:
        """Tokens of text read so far, over all corpora; None unless all are known."""
        return sum(one.tokens for one in self.corpora) if self.corpora and not self.missing_corpora else None

    @property
    def flops(self) -> float | None:
        """FLOPs of training, as `count_flops` does, with all rows at full length."""
        return sum(one.flops for one in self.corpora) if self.corpora and not self.missing_corpora else None


def lineage(checkpoint: Path) -> Lineage:
    """Where `checkpoint` comes from: from its files, and from its run and corpora if they are there."""
    index = checkpoint_index.read(checkpoint)
    config = _config(checkpoint)
    known = Lineage(average_of=index.identity.get(AVERAGE_OF), step=index.step, rows=index.position)
    if config is None:
        return replace(known, missing_corpora=len(index.consumed))
    consumed = zip(config.data.train, index.consumed, strict=False)
    corpora = [_corpus(entry.corpus, rows, index, config.data.objective) for entry, rows in consumed]
    curve, results = _measured(checkpoint, index.step)
    settings = {
        "run": {"seed": config.run.seed, "max_steps": config.run.max_steps},
        **config.model_dump(mode="json", include=set(_SETTINGS)),
        "model": index.model.model_dump(mode="json"),
        **({"objective": config.data.objective.model_dump(mode="json")} if config.data.objective else {}),
        **(
            {"curriculum": [one.model_dump(mode="json") for one in stages]}
            if (stages := config.data.curriculum)
            else {}
        ),
        **({"wrapper": wrapper} if (wrapper := index.identity.get("wrapper")) else {}),
    }
    known_corpora = [one for one in corpora if one is not None]
    objectives = [config.data.objective, *(one.corpus.objective for one in known_corpora)]
    return replace(
        known,
        name=config.run.name,
        corpora=known_corpora,
        missing_corpora=corpora.count(None),
        curve=curve,
        results=results,
        settings=masked_values(settings),
        objective=next((one.name for one in objectives if one is not None), None),
    )


def _config(checkpoint: Path) -> RunConfig | None:
    """The run file of the checkpoint; None for an import, and for one that today's settings don't fit."""
    try:
        return load(checkpoint / CONFIG, [], RunConfig) if (checkpoint / CONFIG).exists() else None
    except UserError:
        return None


def _corpus(
    location: str, rows: int, index: checkpoint_index.Index, objective: Objective | None
) -> TrainingCorpus | None:
    """The corpus in a local directory, if it is still the one that the checkpoint was trained on."""
    try:
        corpus = open_corpus(location) if Path(location).is_dir() else None
    except (UserError, FailedError):
        corpus = None
    trained_on = {one["fingerprint"] for one in index.identity.get("data", {}).get("corpora", [])}
    if corpus is None or corpus.fingerprint not in trained_on:
        return None
    inputs, targets = (objective or corpus.objective).shape
    of_row = count_flops(models.outline(index.model), Sizes.of_example(inputs, targets))
    return TrainingCorpus(corpus, rows, rows * of_row)


def _measured(checkpoint: Path, step: int) -> tuple[list[tuple[int, float]], dict[str, float]]:
    """The curve of the loss, and the last results of held-out texts, up to `step`."""
    if checkpoint.parent.name != "checkpoints":
        return [], {}
    curve: list[tuple[int, float]] = []
    results: dict[str, float] = {}
    for row in read_metrics(checkpoint.parent.parent):
        if row.step > step:
            break
        if "train/loss" in row.metrics:
            curve.append((row.step, row.metrics["train/loss"]))
        results |= {name: value for name, value in row.metrics.items() if name.startswith(_RESULTS)}
    return curve, {name: value for name, value in results.items() if math.isfinite(value)}
