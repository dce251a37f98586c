"""docs/results/scaling.svg: the memory of a GPU at each ZeRO stage, from the table of T5 11B in docs/results/plans.md.

.venv/bin/python -m docs.pictures.plans
"""

import io
from pathlib import Path

from data_pipeline.base.atomic import write_bytes

FOLDER = Path(__file__).parents[1] / "results"
RUN, GPUS, MEMORY = "configs/runs/t5-v1.0-11b-c4.yaml", "--gpus 64 --gpu a100-80gb", 80
PARTS = ["weights", "fp32 weights, moments", "gradients", "buffers, reducing", "activations of one row"]


def table() -> dict[str, list[float]]:
    """GiB of each part, by stage."""
    page = (FOLDER / "plans.md").read_text()
    lines = page.partition(f"{RUN} {GPUS}")[2].partition("\nstage ")[2].splitlines()[1:7]
    cells = [line.replace("yes", "   ").split() for line in lines]
    names = [f"stage {line[0]}{', recomputing' if 'yes' in line else ''}" for line in lines]
    return {name: [float(cell) for cell in row[1 : 1 + len(PARTS)]] for name, row in zip(names, cells, strict=True)}


def svg(sizes: dict[str, list[float]]) -> bytes:
    """The sizes are also in its description: the picture can be compared with the table."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(sizes)
    for part, widths in zip(PARTS, zip(*sizes.values(), strict=True), strict=True):
        axes.barh([*sizes], widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.axvline(MEMORY, color="black", linestyle="--")
    axes.invert_yaxis()
    axes.set_xlabel("GiB of a GPU")
    axes.legend(loc="lower right", bbox_to_anchor=(0.8, 0.02), fontsize="small")
    drawn = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scaling"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Description": str(sizes)})
    return drawn.getvalue()


if __name__ == "__main__":
    write_bytes(FOLDER / "scaling.svg", svg(table()))
