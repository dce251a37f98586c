"""Draws one picture of a run: its losses over the steps, and its decoder's cross-attention on a validation row."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.base.atomic import write_bytes
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import validation_batches
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import CONFIG
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.diagnostics.attention_maps import Pattern, attention_patterns, plain
from pretrain.evaluate.record import new_figure, png
from pretrain.run.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOSS = re.compile(r"validation/(.+)/text_loss")
_TOKENS = 48  # on an axis, at most
_INCHES_PER_TOKEN = 0.14
_LEAST_WORTH = 0.05  # nats per token: a model reads its input if another row's input raises its loss by as much
_BOUNDS = {"unigrams": "--", "bigrams": ":"}  # baselines that need no model, with the styles of their lines


def draw(run: Path, out: Path, attention: bool = True) -> None:
    """Writes the picture of `run` to `out`, a PNG. `attention=False` leaves the attention out, which needs the model.

    The attention is also left out if the run has no validation corpus any more. Raises UserError for a run without
    evaluations or checkpoints.
    """
    rows = [(row.step, row.metrics) for row in read_metrics(run)]
    names = [found[1] for _, metrics in rows for key in metrics if (found := _LOSS.fullmatch(key))]
    if not names:
        raise UserError(f"{run}: no held-out losses; the run file needs the hook validation_loss")
    pattern = _cross_attention(run) if attention else None
    # a label has room for its letters
    tall = 4.5 if pattern is None else max(4.5, _INCHES_PER_TOKEN * len(pattern.queries) + 1.5)
    wide = 6 if pattern is None else 7 + max(6.0, _INCHES_PER_TOKEN * len(pattern.keys) + 1.5)
    figure = new_figure(wide, tall)
    if said := verdict(names[0], dict(rows)):
        figure.suptitle(said, color="firebrick")
    panels = figure.subplots(1, 1 if pattern is None else 2, squeeze=False)[0]
    _draw_losses(panels[0], names[0], dict(rows))
    if pattern is not None:
        _draw_attention(panels[1], pattern)
    write_bytes(out, png(figure))


def verdict(corpus: str, rows: Mapping[int, Mapping[str, float]]) -> str:
    """A line that says so if the model hasn't learned to read its input, or how frequent tokens are; else ""."""
    for step in sorted(rows, reverse=True):
        names = ("worth", "loss", "unigram_entropy")
        worth, loss, unigrams = (rows[step].get(f"input_use/{corpus}/{name}") for name in names)
        if worth is None or loss is None or unigrams is None:
            continue
        if worth >= _LEAST_WORTH:
            return ""
        more = f", and has not learnt how frequent tokens are: {loss:.2f} > {unigrams:.2f}" if loss > unigrams else ""
        return f"step {step:,}: the model doesn't read its input yet ({worth:.2f} nats/token){more}"
    return ""


def _draw_losses(axes: "Axes", corpus: str, rows: Mapping[int, Mapping[str, float]]) -> None:
    for label, name in _curves(corpus, rows).items():
        points = [(step, metrics[name]) for step, metrics in rows.items() if name in metrics]
        if not points:
            continue
        if style := _BOUNDS.get(label):
            axes.axhline(points[-1][1], color="grey", linestyle=style, label=label)
        else:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(title=f"{corpus}: held-out text", xlabel="step", ylabel="nats per token")
    axes.legend()


def _curves(corpus: str, rows: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """The metric of each curve. All are of the same validation rows: those of the hook input_use if it ran."""
    use = f"input_use/{corpus}"
    if not any(f"{use}/loss" in metrics for metrics in rows.values()):
        validation = f"validation/{corpus}"
        return {"with its input": f"{validation}/text_loss", "unigrams": f"{validation}/unigram_entropy"}
    return {
        "with its input": f"{use}/loss",
        "with another row's input": f"{use}/other_input_loss",
        "unigrams": f"{use}/unigram_entropy",
        "bigrams": f"{use}/bigram_entropy",
    }


def _cross_attention(run: Path) -> Pattern | None:
    """The cross-attention of the latest checkpoint on the first validation row; None if the model has none, or the run
    has no validation corpus."""
    checkpoint = checkpoint_in(run)
    config = load(checkpoint / CONFIG, [], RunConfig)
    if not config.data.validation:
        return None
    entry = config.data.validation[0]
    corpus = open_corpus(entry.corpus).with_objective(config.data.held_out_objective(entry))
    row = next(validation_batches(corpus, BatchLayout(0, 1, 1, 1)))
    trained = TrainedModel.open(checkpoint)
    return attention_patterns(trained.model, row, trained.tokenizer, _TOKENS).get("cross")


def _draw_attention(axes: "Axes", pattern: Pattern) -> None:
    """Draws the strongest weight over all layers and heads. Black is the strongest of the picture; the title has its
    value, which is small for a model that has hardly been trained."""
    strongest = pattern.weights.amax(dim=(0, 1))
    axes.imshow(strongest, cmap="Greys", vmin=0, aspect="auto")
    axes.set_xticks(range(len(pattern.keys)), plain(pattern.keys), rotation=90, fontsize=7)
    axes.set_yticks(range(len(pattern.queries)), plain(pattern.queries), fontsize=7)
    title = f"Cross-attention from the decoder to the input: up to {strongest.max():.2f}"
    axes.set(title=title, xlabel="input", ylabel="read by the decoder")
