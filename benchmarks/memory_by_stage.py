"""The memory of a GPU at each ZeRO stage, by part, as a picture: docs/results/scaling.svg.

python benchmarks/memory_by_stage.py [RUN.yaml] [--gpus 64] [--gpu a100-80gb] [--rows 1] [--out FILE.svg]
"""

import argparse
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from data_pipeline.foundation.config_file import load
from pretrain.config import RunConfig
from pretrain.run.gpus import gpu_named
from pretrain.tools.plan.planner import GIB, Planner, Question
from pretrain.tools.plan.row_lengths import described
from pretrain.tools.plan.zero_memory import settings, states

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=ROOT / "configs/runs/t5-v1.0-11b-c4.yaml")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/scaling.svg")
    options = parser.parse_args()
    config, row = described(load(options.run, [], RunConfig), options.run, None, None)
    gpu = gpu_named(options.gpu)
    planner = Planner(Question(config, row, options.gpu, gpu, 8, gpu.network, mfu=0.31, price=0.0))
    bars: dict[str, dict[str, float]] = {}
    for setting in settings(config):
        held = states(planner.parameters, setting, options.gpus, config.precision, planner.zero)
        passing = planner.activations(options.rows, setting.checkpointing).total
        parts = {
            "weights": held.weights,
            "master weights and moments": held.master_weights + held.moments,
            "gradients": held.gradients,
            "buffers": held.buffers,
            "activations, reducing": held.peak(passing) - held.lasting - held.buffers,
        }
        label = f"stage {setting.stage}"
        label += "" if setting.offload == "none" else f", {setting.offload} offloaded"
        label += ", recomputing" if setting.checkpointing else ""
        bars[label] = {name: size / GIB for name, size in parts.items()}
    draw(
        bars,
        f"{config.run.name} on {options.gpus} × {options.gpu}, micro-batches of {options.rows}",
        gpu.memory,
        options.out,
    )


def draw(bars: dict[str, dict[str, float]], title: str, memory: float, out: Path) -> None:
    """Writes a picture of stacked bars in GiB, with a line at the GPU's `memory`; the same bytes each time."""
    matplotlib.rcParams.update({"svg.hashsalt": "plan", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    left = [0.0] * len(bars)
    for name in next(iter(bars.values())):
        sizes = [parts[name] for parts in bars.values()]
        axes.barh(list(bars), sizes, left=left, label=name)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes.axvline(memory, color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of a GPU")
    axes.set_title(title)
    axes.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
