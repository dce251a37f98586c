"""Runs the benchmarks of speed and writes docs/results/performance.md.

    python benchmarks/performance.py [--only training_step …] [--page]

Each runs as a process of its own, one after the other, and leaves its figures in benchmarks/results/NAME.json. The page
is made from these files: a benchmark that fails or isn't run keeps its older figures, and --page makes the page again
without running anything. The set takes less than 20 minutes on two cores, without the compiled step and serving:
`--only compiled_step first_token` measures them, in ten minutes more. `make gpu` measures a GPU.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from harness import ROOT, Table

RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/results/performance.md"
BUDGET = 20 * 60  # s
# name of the figures: benchmark and its arguments, the most telling first
BENCHMARKS: dict[str, list[str]] = {
    "training_step": ["training_step.py", "--seconds", "3"],
    "engine_overhead": ["engine_overhead.py", "--seconds", "3"],
    "optimizers": ["optimizers.py", "--seconds", "2"],
    "generation": ["generation.py", "--threads", "1", "--rounds", "2"],
    "products": ["products.py", "--models", "t5-v1.1-small", "--threads", "1", "--seconds", "3"],
    "attention": ["attention_forms.py", "--seconds", "1"],
    "tokenizers": ["tokenizer_speed.py", "--seconds", "4"],
    "allowed": ["allowed_outputs.py", "--seconds", "1"],
    "loss_head": ["loss_head.py", "--seconds", "1"],
    "start_up": ["start_up.py"],
    "saving": ["saving.py", "--model", "t5-v1.1-small", "--stages", "1", "--precision", "bf16"],
    "compiled_step": ["training_step.py", "--compiled", "--models", "t5-v1.1-small", "--threads=1", "--seconds=3"],
    "first_token": ["first_token.py", "--threads", "1"],
}
ASKED_FOR = {"compiled_step", "first_token"}  # only with --only: each takes minutes
QUESTIONS = {"compiled_step": "Is a compiled training step faster than transformers' compiled?"}
INTRODUCTION = """# Performance

`make bench` measures on a CPU and writes this page; [on one GPU](gpu.md) has what `make gpu` measures. Do not edit this
page: its words are in `benchmarks/`, in the file that each section names.

In every table both sides do the same work in one process, in turns, in reversed order every other round. A time is the
median of the rounds, ± half the distance between the quartiles. A ratio is the median over the rounds; above 1, ours is
faster. With one thread, times are the process's processor time, otherwise the wall clock's. The samples are in
`benchmarks/results/`.
"""
PROFILES = """## Where a step goes

![the operations of a training step of T5-v1.1-small, before and after](step-profile.svg)

A step of T5-v1.1-small on one thread, before the work on its speed and on 2026-11-21, and transformers' on the same
tokens: the processor's time by kind of operation, from `torch.profiler`. Only our later step keeps freed memory, as our
ranks do.
"""
LONGER = """## Others

`python benchmarks/cleaning_speed.py` measures each reader and each cleaning rule on one core, and `python
benchmarks/recipes.py` counts what the [recipes](../how-to/recipes.md) take. Pages beside this one have the figures of
measurements that were made once, and say how.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="benchmarks to run; by default all")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    failed = [] if options.page else list(run(options.only))
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(only: list[str] | None) -> Iterator[str]:
    """Runs the benchmarks; yields the names of those that fail or for which no time is left."""
    started = time.perf_counter()
    for name in only or [name for name in BENCHMARKS if name not in ASKED_FOR]:
        program, *arguments = BENCHMARKS[name]
        left = None if only else BUDGET - (time.perf_counter() - started)
        command = [sys.executable, str(ROOT / "benchmarks" / program), *arguments]
        print(f"{name}: {program} {' '.join(arguments)}", flush=True)
        try:
            done = subprocess.run(
                [*command, "--json", str(RESULTS / f"{name}.json")], cwd=ROOT, timeout=left, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            done = 124
        if done:
            yield name


def page() -> str:
    files = [RESULTS / f"{name}.json" for name in BENCHMARKS]
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files if path.exists()}
    most = machine(next(iter(records.values())))
    sections = [section(name, record, most) for name, record in records.items()]
    return (
        "\n\n".join(part.strip() for part in [INTRODUCTION, "## On a CPU", f"{most}.", *sections, PROFILES, LONGER])
        + "\n"
    )


def machine(record: dict[str, Any]) -> str:
    found = record["machine"]
    extensions = " and ".join(name.upper().replace("_", "-") for name in found["bf16"])
    cpu = f"{found['cores']} cores of {found['processor']}" + (f" with {extensions}" if extensions else "")
    versions = ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "deepspeed", "transformers"))
    return f"{cpu}; {versions}"


def section(name: str, record: dict[str, Any], most: str) -> str:
    """`most`: the machine that the page names above all sections."""
    tables = [Table(**table).markdown for table in record["tables"]]
    other = f" on {machine(record)}," if machine(record) != most else ""
    when = f"Taken {record['date']} in {record['seconds']} s,{other} at a load of {record['load_before']}"
    asked = QUESTIONS.get(name, record["question"])
    parts = [f"### {asked}", record["notes"], f"{when} before it, by `{record['command']}`.", *tables]
    return "\n\n".join([*parts, f"What limits it now: {record['limit']}"])


if __name__ == "__main__":
    main()
