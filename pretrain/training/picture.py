"""Draws one picture of a run: its losses over the steps."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.base.atomic import write_bytes
from data_pipeline.base.errors import UserError
from pretrain.evaluate.record import new_figure, png
from pretrain.run.metrics_file import FILE_NAME, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOSS = re.compile(r"validation/(.+)/text_loss")
_LEAST_WORTH = 0.05  # nats per token: a model reads its input if another row's input raises its loss by as much
_BOUNDS = {"unigrams": "--", "bigrams": ":"}  # baselines that need no model, with the styles of their lines


def draw(run: Path, out: Path) -> None:
    """Writes the picture of `run` to `out`, a PNG. Raises UserError for a directory without metrics, and for a run
    without evaluations."""
    if not (run / FILE_NAME).exists():
        raise UserError(f"{run}: no {FILE_NAME} here; give a run directory")
    rows = [(row.step, row.metrics) for row in read_metrics(run)]
    names = [found[1] for _, metrics in rows for key in metrics if (found := _LOSS.fullmatch(key))]
    if not names:
        raise UserError(f"{run}: no held-out losses; the run file needs the hook validation_loss")
    figure = new_figure(6, 4.5)
    if title := verdict(names[0], dict(rows)):
        figure.suptitle(title, color="firebrick")
    _draw_losses(figure.add_subplot(), names[0], dict(rows))
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
    """The metric of each curve. All curves are of the same validation rows, of the hook input_use if it ran."""
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
