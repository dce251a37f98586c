"""Where does a training step spend its time, before and after?

    python benchmarks/step_profile.py [--precision fp32] [--before COMMIT] [--out docs/results/step-profile.svg]

One step of T5-v1.1-small on one thread, 4 × 512/114, in bf16 where the processor has arithmetic for it: with the code
of the commit before the work on its speed, in a worktree of its own, with the code of now, and with transformers. A bar
is the processor's time of a step without the profiler, in the shares that the profiler shows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from matplotlib import pyplot, rcParams
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[1]
BEFORE = "663c593"
SIDES = ("before", "now", "transformers")
KINDS = {
    "matrix products": ("mm", "bmm", "addmm", "baddbmm", "addmv_"),
    "attention kernels": ("_scaled_dot_product",),
    "softmax": ("_softmax", "_softmax_backward_data", "_log_softmax", "logsumexp"),
    "activations": ("gelu", "gelu_backward", "tanh", "pow"),
    "sums and products": ("add", "add_", "mul", "mul_", "addcmul_", "div", "div_", "rsqrt_", "rsqrt", "sub", "where"),
    "reductions": ("sum", "mean", "linalg_vector_norm", "unfold_backward"),
    "copies": ("copy_", "cat", "clone"),
    "fills and embeddings": ("fill_", "zero_", "embedding_dense_backward", "index_select"),
}
THE_REST = "the rest"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/step-profile.svg")
    parser.add_argument("--precision", choices=tuple(DTYPES), default=native())
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.side:
        step = their_step if options.side == "transformers" else our_step
        print(json.dumps(of_step(step(options.precision))))
        return
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", tree, options.before], cwd=ROOT, check=True)
        try:
            trees = {"before": tree}
            bars = {side: profiled(side, trees.get(side, ROOT), options.precision) for side in SIDES}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    draw(bars, options.precision, options.out)
    print(json.dumps(bars, indent=1))


def native() -> str:
    """The lowest precision that this processor has arithmetic for."""
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


def profiled(side: str, tree: Path, precision: str) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--side", side, "--precision", precision]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def our_step(precision: str) -> Callable[[], object]:
    """With the code that PYTHONPATH names, which may be older than this file."""
    from pretrain import models

    try:
        from pretrain.zero.memory import keep_freed_memory  # what ranks do
    except ImportError:
        pass
    else:
        keep_freed_memory()
    values = yaml.safe_load((ROOT / "configs/models/t5-v1.1-small.yaml").read_text(encoding="utf-8"))["model"]
    torch.manual_seed(0)
    model = models.build(models.T5Config.model_validate(values)).to(DTYPES[precision]).train()
    inputs, labels = torch.randint(10, 30_000, (4, 512)), torch.randint(10, 30_000, (4, 114))

    def step() -> None:
        model(encoder_input_ids=inputs, labels=labels)["labels"].mean().backward()
        model.zero_grad()

    return step


def their_step(precision: str) -> Callable[[], object]:
    from peers import CPU_WORK, pair

    return pair(CPU_WORK[0], precision, "cpu")[0]["transformers, eager"]


def of_step(step: Callable[[], object], steps: int = 3) -> dict[str, float]:
    """Seconds of each kind of operation in a step."""
    torch.set_num_threads(1)
    step()
    seconds = []
    for _ in range(steps):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    taken = dict.fromkeys([*KINDS, THE_REST], 0.0)
    for event in profiler.key_averages():
        taken[kind(event.key.removeprefix("aten::"))] += event.self_cpu_time_total
    whole = sum(taken.values())
    return {name: part / whole * statistics.median(seconds) for name, part in taken.items()}


def kind(operation: str) -> str:
    for name, operations in KINDS.items():
        if operation in operations or (name == "attention kernels" and operation.startswith(operations)):
            return name
    return THE_REST


def draw(bars: dict[str, dict[str, float]], precision: str, out: Path) -> None:
    """Writes a picture of stacked bars in seconds; the same bytes each time."""
    rcParams.update({"svg.hashsalt": "step", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(9, 3.2))
    left = [0.0] * len(bars)
    for name in next(iter(bars.values())):
        widths = [parts[name] for parts in bars.values()]
        axes.barh(list(bars), widths, left=left, label=name, height=0.6)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for row, whole in enumerate(left):
        axes.text(whole, row, f" {whole:.2f} s", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.1)
    axes.set_xlabel("processor seconds of a step")
    axes.set_title(f"T5-v1.1-small, 4 × 512/114, {precision}, one thread")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=5, frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(out, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
