"""`python -m experiments.mup`: the checks, their table and their picture."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from data_pipeline.base.atomic import write_bytes, write_json
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import aligned
from experiments.mup.coordinates_and_transfer import (
    SEEDS,
    STEPS,
    STEPS_OF_TRANSFER,
    Coordinates,
    Transfer,
    Verdict,
    coordinates,
    judged,
    transfer,
)
from experiments.mup.trial import LOGITS
from experiments.mup.widths import Subject, check_widths, default_widths, subject
from pretrain.config import RunConfig
from pretrain.evaluate.record import png

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def mup_check(path: Path, overrides: Sequence[str], widths: str | None, out: Path | None) -> int:
    """Runs both checks on the run file at `path`; returns the exit code, 1 if one of them fails.

    `out` gets mup-check.json and mup-check.png.
    """
    config = load(path, overrides, RunConfig)
    checked = subject(config, max(STEPS, STEPS_OF_TRANSFER))
    chosen = sorted(_parsed(widths)) if widths else default_widths(checked.model)
    check_widths(checked, chosen)
    started = time.monotonic()
    print(f"{path}: widths {', '.join(map(str, chosen))}, base {checked.base_width}, {checked.source}", flush=True)
    with_mup, without = (coordinates(checked, config.optimizer, chosen, mup) for mup in (True, False))
    verdicts = judged(with_mup, checked, config.optimizer)
    print("\n" + coordinate_table(with_mup, without, verdicts, chosen) + "\n", flush=True)
    rates = transfer(checked, config.optimizer, chosen[:3])
    verdicts.append(rates.verdict())
    print(transfer_table(rates, config.optimizer.learning_rate) + "\n")
    out = out or Path("runs", f"mup-check-{config.run.name}")
    content = as_json(checked, with_mup, without, rates, verdicts)
    write_json(out / "mup-check.json", content)
    write_bytes(out / "mup-check.png", png(picture(with_mup, without, rates, config.optimizer.learning_rate)))
    failed = [verdict.what for verdict in verdicts if verdict.verdict == "fails"]
    print(f"{out}: mup-check.json, mup-check.png ({time.monotonic() - started:.0f} s)")
    print(f"fails: {'; '.join(failed)}" if failed else "muP holds over these widths")
    return 1 if failed else 0


def _parsed(widths: str) -> list[int]:
    """ "64 128 256" or "64,128,256"."""
    parts = widths.replace(",", " ").split()
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"--widths: {widths!r}; expected whole numbers, such as 64,128,256")
    return [int(part) for part in parts]


def coordinate_table(
    with_mup: Coordinates, without: Coordinates, verdicts: Sequence[Verdict], widths: Sequence[int]
) -> str:
    """Root mean squares by width, and the largest over the smallest with muP and without."""
    rows = [["", *map(str, widths), "max/min", "", "without"]]
    by_name = {verdict.what: verdict for verdict in verdicts}
    when = (("start", with_mup.start, without.start), (f"after {STEPS} steps", with_mup.after, without.after))
    for name, values, others in when:
        for kind, by_width in values.items():
            verdict = by_name.get(f"{kind}, {name}")
            title = f"targets' logits, rise {name}" if kind == LOGITS and name != "start" else f"{kind}, {name}"
            cells = [f"{by_width[width]:.3g}" for width in widths]
            word = verdict.verdict if verdict else "falls by design"
            rows.append([title, *cells, f"{_ratio(by_width):.2f}", word, f"{_ratio(others[kind]):.2f}"])
    for kind, by_width in with_mup.change.items():
        verdict = next(one for one in verdicts if one.what.startswith(f"first change of {kind},"))
        cells = [f"{by_width[width]:.2e}" for width in widths]
        rows.append([verdict.what, *cells, f"off {verdict.ratio:.0%}", verdict.verdict, ""])
    return "\n".join(aligned(rows))


def _ratio(by_width: Mapping[int, float]) -> float:
    return max(by_width.values()) / max(min(by_width.values()), 1e-300)


def transfer_table(found: Transfer, rate: float) -> str:
    """Losses by width and rate, and the best rate of each width."""
    powers = sorted({power for losses in found.losses.values() for power in losses})
    rows = [["rate", *(f"{rate * 2.0**power:.2g}" for power in powers), "best"]]
    for width, losses in found.losses.items():
        cells = [f"{losses[power]:.3f}" if power in losses else "" for power in powers]
        rows.append([f"width {width}", *cells, f"{rate * found.best(width):.2g}"])
    verdict = found.verdict()
    summary = (
        f"Best rates differ by {verdict.ratio:.2f}×: {verdict.verdict} "
        f"({STEPS_OF_TRANSFER} steps, {len(SEEDS)} seeds, mean of the last losses)"
    )
    return "\n".join([*aligned(rows), summary])


def as_json(
    checked: Subject, with_mup: Coordinates, without: Coordinates, rates: Transfer, verdicts: Sequence[Verdict]
) -> dict[str, object]:
    """Everything, unrounded."""
    return {
        "base_width": checked.base_width,
        "rows": checked.source,
        "coordinates": {
            name: {"start": found.start, "after": found.after, "change": found.change}
            for name, found in (("mup", with_mup), ("standard", without))
        },
        "transfer": {
            str(width): {"losses": losses, "best_factor": rates.best(width)} for width, losses in rates.losses.items()
        },
        "verdicts": [vars(verdict) for verdict in verdicts],
    }


def picture(with_mup: Coordinates, without: Coordinates, rates: Transfer, rate: float) -> Figure:
    """Activations after some steps over the width, with muP and without, and losses over the rate for each width."""
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    second.sharey(first)
    _draw(first, with_mup, f"with muP, after {STEPS} steps")
    _draw(second, without, f"without, after {STEPS} steps")
    first.set_ylabel("root mean square (logits: rise of the targets')")
    first.legend(fontsize=7)
    for width, losses in rates.losses.items():
        powers = sorted(losses)
        third.plot([rate * 2.0**power for power in powers], [losses[power] for power in powers], ".-", label=str(width))
    third.set(title="with muP: loss over the learning rate", xscale="log", xlabel="learning rate", ylabel="nats")
    third.legend(title="width", fontsize=7)
    return figure


def _draw(axes: "Axes", found: Coordinates, title: str) -> None:
    for kind, by_width in found.after.items():
        axes.plot(list(by_width), list(by_width.values()), ".-", label=kind)
    axes.set(title=title, xscale="log", yscale="log", xlabel="d_model")
