"""What do the recipes of docs/results/recipes.md take, by count and by `pretrain plan`, without a GPU or a corpus?

python benchmarks/recipes.py [--write docs/results/recipes.md]
"""

import argparse
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from data_pipeline.base.config_file import load
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.objectives.ul2 import UL2
from pretrain.config import RunConfig
from pretrain.device_speed import GPU_MFU, GPUS_PER_NODE, gpu_named
from pretrain.tools.plan import Plan, resolve_rows

ROOT = Path(__file__).parents[1]
RECIPES = (
    "t5gemma2-214m-c4",
    "t5-v1.1-small-c4",
    "t5-v1.1-base-nanot5",
    "t5-v1.1-base-c4",
    "ul2-base-c4",
    "gpt2-small-c4",
    "autoregressive-small-c4",
    "bart-base-c4",
    "t5-v1.1-large-c4",
    "t5-v1.1-large-c4-full",
    "bart-large-c4",
    "t5-v1.0-11b-c4",
)
MACHINES = (("a100-80gb", 1), ("a100-80gb", 8), ("h200", 1), ("a100-80gb", 64))
C4_FILES = 1024
C4_TOKENS = 156e9  # of C4 in T5's pieces (Dodge et al. 2021, table 1)
BEGIN, END = "<!-- benchmarks/recipes.py writes these lines -->\n", "<!-- until here -->\n"


@cache
def corpora() -> dict[str, CorpusConfig]:
    """The shipped corpus files by the directory that each builds."""
    files = (load(path, [], CorpusConfig) for path in sorted((ROOT / "configs/corpora").glob("*.yaml")))
    return {config.output: config for config in files}


def plan_of(recipe: str, gpu: str, gpus: int) -> Plan:
    """The plan of a recipe on GPUs of one kind. Rows are as long as its corpus file says."""
    path = ROOT / f"configs/runs/{recipe}.yaml"
    config, row, _ = resolve_rows(load(path, [], RunConfig), path)
    return Plan(config, row, gpu, gpu_named(gpu), gpus, GPU_MFU, price=2.0, nodes=-(-gpus // GPUS_PER_NODE))


def tokens(recipe: str) -> float:
    """Tokens of text that the run reads if its rows are full."""
    config = load(ROOT / f"configs/runs/{recipe}.yaml", [], RunConfig)
    objective = corpora()[config.data.train[0].corpus].rows.objective
    length = float(objective.raw_lengths.mean()) if isinstance(objective, UL2) else objective.raw_length
    return config.run.max_steps * config.batch.global_batch_size * length


def hours(recipe: str, gpu: str, gpus: int) -> str:
    """Of the fastest setting that fits, "–" if none does."""
    fitting = [option.hours for option in plan_of(recipe, gpu, gpus).options if option.rows]
    return "–" if not fitting else f"{min(fitting):,.0f}" if min(fitting) >= 20 else f"{min(fitting):.1f}"


def counted(recipe: str) -> list[str]:
    """The exact columns of a row of the table."""
    plan = plan_of(recipe, "a100-80gb", 1)
    batch, row = plan.config.batch.global_batch_size, plan.rows
    flops = sum(plan.flops.values()) * batch * plan.config.run.max_steps
    read = tokens(recipe)
    return [
        f"[{recipe}](../../configs/runs/{recipe}.yaml)",
        f"{plan.parameters.count:,}",
        f"{plan.config.run.max_steps:,} × {batch:,}",
        f"{row.inputs}, {row.targets}",
        f"{read / 1e9:,.1f}",
        f"{min(C4_FILES, math.ceil(read / C4_TOKENS * C4_FILES)):,}",
        f"{flops:.2g}".replace("e+", "e"),
    ]


def table() -> Iterator[str]:
    """Lines of Markdown."""
    columns = ["recipe", "parameters", "steps × rows", "inputs, targets", "10⁹ tokens", "files of C4", "FLOPs"]
    columns += [f"{gpus} × {gpu.split('-')[0].upper()}, h" for gpu, gpus in MACHINES]
    yield "| " + " | ".join(columns) + " |"
    yield "| --- " + "| ---: " * (len(columns) - 1) + "|"
    for recipe in RECIPES:
        yield "| " + " | ".join([*counted(recipe), *(hours(recipe, *machine) for machine in MACHINES)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the page that gets the table")
    options = parser.parse_args()
    lines = ""
    for line in table():
        print(line, flush=True)
        lines += line + "\n"
    if options.write:
        before, rest = options.write.read_text(encoding="utf-8").split(BEGIN)
        options.write.write_text(before + BEGIN + lines + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
