"""What does it cost to survive faults?

    python benchmarks/fault_costs.py [--ranks 2] [--stages 1 2] [--steps 240] [--sizes 1 12 60]

T5s of 1, 12 or 60 million parameters train with AdamW in fp32 on the shipped text. Every eighth step is replayed, or
has checksums of weights and moments before and after it. What that adds is the
time of the steps that it may slow down, minus as many times the median of the steps that are not near one, both of the
same run. The share is of the time at the interval that `auto` chooses.
"""

import argparse
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from fault_hunting import memory as hunting
from fault_hunting import replay
from harness import ROOT, Options, Table, main
from start_up import command

from pretrain.config import RunConfig
from pretrain.models import meta_model
from pretrain.models.flops import Sizes, count_flops
from pretrain.run.metrics_file import read_metrics
from pretrain.run.world import World
from pretrain.training.prepare import prepare

LIMIT = """A replay is the two passes of a micro-batch once more, and of several ranks again for the rank before."""
EVERY, NEAR = 8, 3  # steps from one to the next; steps that one may slow down
FIRST = 16  # steps that are left out
ROWS = 16  # of a rank
MODELS = {  # by millions of parameters
    1: {"d_model": 64, "num_heads": 1, "d_ff": 176, "num_encoder_layers": 2, "num_decoder_layers": 2},
    12: {"d_model": 256, "num_heads": 4, "d_ff": 704, "num_encoder_layers": 4, "num_decoder_layers": 4},
    60: {"d_model": 512, "num_heads": 8, "d_ff": 1408, "num_encoder_layers": 8, "num_decoder_layers": 8},
}
WHAT = {"replay": "fault_hunting:Replay", "checksums": "fault_hunting:MemoryChecksums"}


def run_file(folder: Path, corpus: Path, size: int, stage: int, steps: int, ranks: int, what: str) -> Path:
    path = folder / f"{what.replace(' ', '-')}-{size}-{stage}.yaml"
    config = {
        "run": {"name": "costs", "directory": str(folder / path.stem), "max_steps": steps},
        "model": {"family": "t5", "d_kv": 64, "pad_vocab_to_multiple_of": 8192 if size > 1 else 2048, **MODELS[size]},
        "data": {"train": [{"corpus": str(corpus)}], "workers": 0},
        "batch": {"global_batch_size": ROWS * ranks, "micro_batch_size": ROWS},
        "optimizer": {"name": "adamw", "learning_rate": 1e-4},
        "precision": "fp32",
        "deepspeed": {"zero_optimization": {"stage": stage}},
        "tracking": {"mlflow": None, "log_every_steps": 1},
        "checkpoint": {"every_steps": 10 * steps},
        "faults": {"max_restarts": 1},
        "callbacks": [{"name": WHAT[what], "every_steps": EVERY}],
    }
    path.write_text(json.dumps(config))
    return path


def costs(seconds: Mapping[int, float]) -> tuple[list[float], float]:
    """What each event adds, and the median step without one: of steps and their seconds."""
    last = max(seconds) - NEAR
    events = [step for step in seconds if step % EVERY == 0 and FIRST < step < last]
    near = {step + offset for step in events for offset in range(NEAR)}
    plain = statistics.median(taken for step, taken in seconds.items() if FIRST < step < last and step not in near)
    return [sum(seconds[step + offset] for offset in range(NEAR)) - NEAR * plain for step in events], plain


def interval(what: str, path: Path, ranks: int) -> int:
    """Steps from one to the next, as `auto` chooses for the run file `path`."""
    if what == "replay":
        return replay.interval(1, ranks, save_every=1000)
    run = prepare(RunConfig.model_validate(json.loads(path.read_text())), World.on_this_node(ranks))
    model = meta_model(run.model)
    read = 4 * model.num_parameters() * (1 + 3 / ranks)  # weights, and this rank's master weights and two moments
    return hunting.interval(int(read), ROWS * count_flops(model, Sizes.of_example(*run.lengths)), "cpu")


def measure(options: Options) -> Iterator[Table]:
    given = options.arguments
    columns = [
        "",
        "parameters",
        "stage",
        "a step",
        "added by one",
        "± standard error",
        "one in",
        "share of the time",
    ]
    table = Table(f"Costs on {given.ranks} ranks, {given.steps} steps each", columns)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command("data_pipeline", "build", ROOT / "configs/corpora/quickstart.yaml", f"output={folder / 'corpus'}")
        for size, stage, what in itertools.product(given.sizes, given.stages, WHAT):
            path = run_file(folder, folder / "corpus", size, stage, given.steps, given.ranks, what)
            command("launch", "local", path, "--ranks", str(given.ranks))
            rows = read_metrics(folder / path.stem)
            seconds = {row.step: row.metrics["train/seconds"] for row in rows if "train/seconds" in row.metrics}
            added, plain = costs(seconds)
            mean, error = statistics.fmean(added), statistics.stdev(added) / math.sqrt(len(added))
            every = interval(what, path, given.ranks)
            cells = [f"{plain * 1e3:.0f} ms", f"{mean * 1e3:.0f} ms", f"{error * 1e3:.0f} ms", f"{every} steps"]
            share = f"{mean / plain / every:.2%}" if mean > error else "not to be seen"
            table.add(what, f"{size} M", stage, *cells, share, added=added, plain=plain)
    yield table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--sizes", type=int, nargs="+", choices=MODELS, default=[12])


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
