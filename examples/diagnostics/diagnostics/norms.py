"""The hook `norms`: norms of gradients, weights, updates and activations by layer, over the steps of a run."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diagnostics.settings import NormsSettings
from pretrain.evaluate.hook import EvalResult, Evaluation, Row
from pretrain.evaluate.record import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from diagnostics.step_norms import StepNorms
    from pretrain.engine.engine import Engine

_TABLE = "norms"
_MOST_STEPS = 200  # columns of a heat map
_PANELS = {
    "gradient": "gradient, L2",
    "weight": "weights, L2",
    "update_to_weight": "update ÷ weights",
    "activation": "activations, RMS",
}


class Norms:
    """Metrics `norms/KIND/LAYER` of the last training step, a table `norms`, and a heat map of layers by steps.

    A parameter outside the layers, such as the embedding, appears under its module's name. A tied matrix counts once,
    as the embedding. A skipped step has no norms.
    """

    def __init__(self, settings: NormsSettings):
        self._measured: StepNorms | None = None
        self._norm = math.nan

    @contextlib.contextmanager
    def during(self, engine: "Engine") -> Iterator[None]:
        # It imports DeepSpeed, which chooses its accelerator when it is imported: that must be in the process group.
        from diagnostics.step_norms import StepNorms

        self._measured = None
        measured = StepNorms(engine)
        with measured.measuring():
            yield
        self._measured = measured if engine.applied else None
        self._norm = engine.gradient_norm

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        measured = self._measured
        if measured is None:
            return EvalResult(lines=["norms: the step was skipped, so there are no norms"])
        if measured.error is not None:
            raise measured.error
        parameters, activations = evaluation.sum(measured.parameters), evaluation.sum(measured.activations)
        if evaluation.held_out.layout.rank != 0:
            return EvalResult()
        rows = by_layer(measured.names, parameters, measured.layers, activations, self._norm)
        metrics = {
            f"norms/{kind}/{row['layer']}": value
            for row in rows
            for kind, value in row.items()
            if isinstance(value, float)
        }
        figure = norms_figure([*evaluation.earlier(_TABLE), *({"step": evaluation.step, **row} for row in rows)])
        return EvalResult(metrics, tables={_TABLE: rows}, images={_TABLE: figure})


def by_layer(
    names: Sequence[str], parameters: Tensor, layers: Sequence[str], activations: Tensor, norm: float
) -> list[Row]:
    """The norms of each layer, in the order of `names`, from sums of squares over all ranks.

    `gradient`, before clipping, `weight`, before the step, and `update` are L2 norms of a layer's fp32 parameters.
    `activation` is the RMS of the layer's output over all real tokens of the global batch; None outside layers.

    `names`, `parameters`, `layers` and `activations` are fields of `StepNorms`. `norm`: the L2 norm of the whole
    gradient before clipping.
    """
    owners = [_owner(name, layers) for name in names]
    sums = {owner: torch.zeros(3, dtype=torch.float64) for owner in owners}
    for owner, squares in zip(owners, parameters.cpu(), strict=True):
        sums[owner] += squares
    clipped = math.sqrt(float(parameters[:, 0].sum()))
    unclipped = norm / clipped if clipped else 1.0
    outputs = dict(zip(layers, activations.tolist(), strict=True))
    found: list[Row] = []
    for owner, squares in sums.items():
        gradient, weight, update = squares.sqrt().tolist()
        output_squares, elements = outputs.get(owner, (0.0, 0.0))
        found.append(
            {
                "layer": owner,
                "gradient": gradient * unclipped,
                "weight": weight,
                "update": update,
                "update_to_weight": update / weight if weight else math.nan,
                "activation": math.sqrt(output_squares / elements) if elements else None,
            }
        )
    return found


def _owner(name: str, layers: Sequence[str]) -> str:
    """The layer of a parameter, or else its module: "decoder.final_norm.weight" -> "decoder.final_norm"."""
    return next((layer for layer in layers if name.startswith(f"{layer}.")), name.rpartition(".")[0])


def norms_figure(rows: Sequence[Row]) -> "Figure":
    """A heat map for each kind of norm, from the rows of the table: a line for each layer, a column for each step.

    Of more than 200 steps, evenly spaced ones are shown.
    """
    steps = sorted({row["step"] for row in rows})
    steps = [steps[index] for index in torch.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).long().tolist()]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    figure = new_figure(11, 2.2 + 0.32 * len(layers))
    figure.suptitle(f"norms of each layer, up to step {steps[-1]}")
    panels = figure.subplots(2, 2, squeeze=True).flatten()
    for axes, (kind, title) in zip(panels, _PANELS.items(), strict=True):
        values = {(row["layer"], row["step"]): float(row[kind]) for row in rows if row[kind]}
        shown = [layer for layer in layers if any((layer, step) in values for step in steps)]
        cells = [[values.get((layer, step), math.nan) for step in steps] for layer in shown]
        finite = [value for line in cells for value in line if math.isfinite(value)]
        axes.set_title(title, fontsize=9)
        if not finite:
            continue
        low, high = min(finite), max(finite)
        shades = {"norm": "log", "vmin": low, "vmax": max(high, low * 1.01)}
        drawn_cells = axes.imshow(cells, aspect="auto", interpolation="none", **shades)
        axes.set_yticks(range(len(shown)), shown, fontsize=7)
        ticks = sorted({round(index * (len(steps) - 1) / 4) for index in range(5)})
        axes.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks], fontsize=7)
        figure.colorbar(drawn_cells, ax=axes).ax.tick_params(which="both", labelsize=7)
    for axes in panels[2:]:
        axes.set_xlabel("step", fontsize=8)
    return figure
