"""What a ladder has found: its law, the prediction and what was reached, as a table, as JSON and as a picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from data_pipeline.base import formatting
from experiments.ladder.compared import Other
from experiments.ladder.rungs import Ladder, SizedRung
from experiments.ladder.scaling_law import Law, fit
from pretrain.tools.experiment.results import Result, Spread, ends_by_seed, shown

_HEADINGS = ("rung", "params", "steps", "tokens", "epochs", "FLOPs", "loss", "law")
_SIGNS = {"flops": "C", "parameters": "N"}


@dataclass(frozen=True)
class Prediction:
    """The loss of the next rung: as predicted, its 95 % interval, and what its runs reached, if any has finished."""

    loss: float
    interval: tuple[float, float]
    reached: Spread | None

    @property
    def inside(self) -> bool | None:
        """Whether what was reached lies in the interval."""
        return None if self.reached is None else self.interval[0] <= self.reached.mean <= self.interval[1]


@dataclass(frozen=True)
class Report:
    """`losses`: validation losses at the end of training by rung, then seed. `law`: None until all rungs have one.
    `other`: the ladder of another recipe, which is drawn beside it."""

    ladder: Ladder
    losses: Mapping[str, Mapping[int, float]]
    law: Law | None
    prediction: Prediction | None
    other: Other | None = None

    @classmethod
    def of(cls, ladder: Ladder, results: Sequence[Result], other: Other | None = None) -> "Report":
        """The law is fitted to the mean over seeds of each rung, so that its scatter is that of rungs."""
        losses = {rung.name: ends_by_seed(results, rung.name) for rung in ladder.all}
        if not all(losses[rung.name] for rung in ladder.rungs):
            return cls(ladder, losses, None, None, other)
        means = [fmean(losses[rung.name].values()) for rung in ladder.rungs]
        law = fit([_measure(ladder, rung) for rung in ladder.rungs], means)
        x = _measure(ladder, ladder.next)
        reached = Spread.of(list(losses[ladder.next.name].values()))
        return cls(ladder, losses, law, Prediction(law(x), law.interval(x), reached), other)

    @property
    def means(self) -> dict[str, float]:
        """The mean loss of each rung that has any."""
        return {name: fmean(losses.values()) for name, losses in self.losses.items() if losses}

    def as_json(self) -> dict[str, object]:
        """Everything: FLOPs, tokens and losses unrounded."""
        ladder, law, prediction = self.ladder, self.law, self.prediction
        rungs = [
            {**asdict(rung), "losses": {str(seed): loss for seed, loss in self.losses[rung.name].items()}}
            for rung in ladder.all
        ]
        names = ("E", "A", "alpha")
        return {
            "name": ladder.name,
            "run": str(ladder.run),
            "tokens_per_parameter": ladder.file.tokens_per_parameter,
            "fit_over": ladder.file.fit_over,
            "rungs": rungs[:-1],
            "next": rungs[-1],
            "law": law
            and {
                **{name: getattr(law, name) for name in names},
                "intervals": dict(zip(names, law.intervals, strict=True)),
                "residual": law.residual,
                "degrees_of_freedom": law.degrees,
                "bounded": law.bounded,
            },
            "prediction": prediction
            and {
                "loss": prediction.loss,
                "interval": prediction.interval,
                "reached": prediction.reached and asdict(prediction.reached),
                "inside": prediction.inside,
            },
        }

    def text(self) -> str:
        """The table for a terminal, and what it means."""
        return "\n".join([*formatting.aligned([_HEADINGS, *map(self._cells, self.ladder.all)]), "", *self.words()])

    def markdown(self) -> str:
        """The same as a Markdown table."""
        rows = [self._cells(rung) for rung in self.ladder.all]
        return "\n".join([*formatting.markdown(_HEADINGS, rows), "", *(f"{line}  " for line in self.words()), ""])

    def words(self) -> list[str]:
        """The law and the prediction, a sentence a line."""
        law, prediction, ladder = self.law, self.prediction, self.ladder
        first = ladder.rungs[0]
        said = [
            f"Steps: {ladder.file.tokens_per_parameter:g} tokens of text a parameter; a step has "
            f"{first.rows_per_step:g} rows of {first.tokens_per_row:.1f} (the corpus's manifest)."
        ]
        if law is None or prediction is None:
            missing = [rung.name for rung in ladder.rungs if not self.losses[rung.name]]
            return [*said, f"No law yet: {', '.join(missing)} without a validation loss."]
        sign = _SIGNS[ladder.file.fit_over]
        names = zip(("E", "α"), (law.E, law.alpha), (law.intervals[0], law.intervals[2]), strict=True)
        constants = ", ".join(f"{name} {value:.3f} ({low:.3f} to {high:.3f})" for name, value, (low, high) in names)
        said.append(f"Law: L = {law.E:.3f} + {law.A:.4g} · {sign}^-{law.alpha:.3f}; 95 %: {constants}.")
        low, high = prediction.interval
        said.append(f"Predicted for {ladder.next.name}: {prediction.loss:.3f} ({low:.3f} to {high:.3f}, 95 %).")
        said.append(
            "Interval: linearised covariance of the fit and the scatter of rungs; Student's t, "
            f"degrees of freedom: {law.degrees}."
        )
        if law.bounded:
            said.append("E or α is at the bound of its range: these rungs don't determine it.")
        if prediction.reached is not None:
            where = "inside" if prediction.inside else "outside"
            off = prediction.reached.mean - prediction.loss
            said.append(f"Reached: {prediction.reached.mean:.3f}, {off:+.3f} off, {where} the interval.")
        repeated = [rung.name for rung in ladder.all if rung.epochs > 1]
        if repeated:
            said.append(f"Text is read more than once by {', '.join(repeated)}: the law is then one of repeated text.")
        if self.other is not None:
            said += self.other.words(
                [(one.name, one.flops, self.means[one.name]) for one in ladder.all if one.name in self.means]
            )
        return said

    def _cells(self, rung: SizedRung) -> list[str]:
        loss = shown(Spread.of(list(self.losses[rung.name].values())), ".3f")
        law = "" if self.law is None else f"{self.law(_measure(self.ladder, rung)):.3f}"
        name = rung.name + (" (next)" if rung is self.ladder.next else "")
        tokens, flops = f"{rung.tokens:.3g}".replace("e+0", "e"), f"{rung.flops:.3g}".replace("e+", "e")
        return [name, f"{rung.parameters:,}", f"{rung.steps:,}", tokens, f"{rung.epochs:.2f}", flops, loss, law]

    def picture(self) -> Figure:
        """Losses over the measure, the law through them, the prediction with its interval and what was reached.

        The axis of losses begins below the lowest, not at 0; where it cuts off an interval, the legend has that. A law
        that the rungs don't determine predicts nothing here.
        """
        ladder, law = self.ladder, self.law
        prediction = None if law is None or law.bounded else self.prediction
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.subplots()
        drawn: list[float] = []
        for rung in ladder.all:
            color, marker = ("C1", "*") if rung is ladder.next else ("C0", "o")
            losses = [*self.losses[rung.name].values()]
            axes.plot([_measure(ladder, rung)] * len(losses), losses, marker, color=color)
            drawn += losses
        if law is not None:
            label = f"law of {ladder.name}" + (", not determined" if law.bounded else "")
            end = ladder.rungs[-1] if prediction is None else ladder.next
            along = np.geomspace(_measure(ladder, ladder.rungs[0]), _measure(ladder, end), 100)
            axes.plot(along, [law(one) for one in along], color="C0", linewidth=1, label=label)
        if prediction is not None:
            low, high = prediction.interval
            axes.errorbar(
                _measure(ladder, ladder.next),
                prediction.loss,
                [[prediction.loss - low], [high - prediction.loss]],
                fmt="s",
                color="black",
                capsize=4,
                markersize=4,
                label=f"{ladder.next.name}, predicted: {low:.2f} to {high:.2f} (95 %)",
            )
            drawn.append(prediction.loss)
        if self.other is not None:
            reached = [rung.flops for rung in ladder.all if self.losses[rung.name] or prediction]
            self.other.draw(axes, max(reached, default=0.0))
            drawn += self.other.losses
        unit = "FLOPs of training" if ladder.file.fit_over == "flops" else "parameters"
        axes.set(title=ladder.name, xlabel=unit, ylabel="validation loss, nats per token", xscale="log")
        if drawn:
            room = 0.1 * (max(drawn) - min(drawn)) or 0.1
            floor = math.floor(10 * (min(drawn) - room)) / 10
            axes.set(ylim=(floor, max(drawn) + room), ylabel=f"validation loss, nats per token; axis from {floor:.1f}")
        if law is not None or self.other is not None:
            axes.legend()
        return figure


def _measure(ladder: Ladder, rung: SizedRung) -> float:
    return rung.flops if ladder.file.fit_over == "flops" else float(rung.parameters)
