"""docs/results/kills.svg: how far the losses of killed runs are from the undisturbed runs', from kills/runs.json.

.venv/bin/python -m docs.pictures.kills
"""

import io
import json
from pathlib import Path
from typing import Any

from data_pipeline.base.atomic import write_bytes

FOLDER = Path(__file__).parents[1] / "results"


def svg(runs: list[dict[str, Any]]) -> bytes:
    """A panel for each peer: its first seed. Ticks below are the steps after which the run was killed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    first = {run["result"]["peer"]: run for run in reversed(runs)}
    names = [*dict.fromkeys(run["result"]["peer"] for run in runs)]
    figure = Figure(figsize=(8.0, 0.6 + 1.1 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), sharex=True, sharey=True, squeeze=False)[:, 0]
    highest = max([1e-3, *(loss for run in first.values() for loss in run["curve"]["losses"])])
    for axes, name in zip(panels, names, strict=True):
        curve, seed = first[name]["curve"], first[name]["result"]["seed"]
        axes.plot(range(1, 1 + len(curve["losses"])), curve["losses"])
        axes.plot(curve["kills"], [0.0] * len(curve["kills"]), "|", color="black", markersize=12)
        axes.set_ylim(-0.1 * highest, 1.1 * highest)
        axes.set_title(f"{name}, seed {seed}", fontsize="small", loc="left")
    figure.supxlabel("step", fontsize="small")
    figure.supylabel("difference of losses", fontsize="small")
    drawn = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kills"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


if __name__ == "__main__":
    write_bytes(FOLDER / "kills.svg", svg(json.loads((FOLDER / "kills/runs.json").read_text())))
