"""Is a training step faster than transformers'?

    python benchmarks/training_step.py [--device cuda] [--threads 1 2] [--precision bf16 fp32] [--compiled]

Forward and backward of the mean loss, without an optimizer, of models with the same weights on the same tokens without
padding, in one process, in turns. Dropout is as in each model's config. The ratio is the time of transformers, in the
faster of its two forms of attention, over ours. Compiled: our layers as `compute.compile` does it, and transformers'
whole model, by `torch.compile`. On a CPU both sides keep freed memory, as our ranks do; transformers by itself doesn't.
Where a CPU has no arithmetic for bf16, steps in bf16 are small, not compiled, and taken once on one thread:
transformers needs minutes for a usual one.
On a GPU the tables have the peak memory beyond the weights, and the utilisation: the model's arithmetic over what the
fastest measured product does in the same time.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from harness import Comparison, Options, Side, Table, compare, main, peak_memory
from peers import Work, compiled_pair, pair, works, works_argument

from pretrain.models.flops import count_flops
from pretrain.models.model import Model
from pretrain.training.throughput import measured_peak

LIMIT = """The products, which both sides compute with the same library at about the processor's peak (84 to 93 GFLOP/s
on a core with AVX2). In fp32 they are 88 to 90% of our step there: even a step of nothing else would only be 1.04 to
1.21 times as fast as transformers'. On two threads the products scale by 1.8, and so do both sides. Compiled, our step
in fp32 gains nothing over its eager form, and transformers' catches up. In bf16 the ratio depends on the processor:
where it multiplies bf16 in AMX, products take less than half of our step, and operations on activations (softmax, GELU,
norms, sums) the rest, which a compiler can fuse; where it has no arithmetic for bf16, PyTorch's products run at 1 to 9
GFLOP/s, and runs compute in fp32."""


def measure(options: Options) -> Iterator[Table]:
    slow = [precision for precision in options.precisions if options.slow(precision)]
    usual = [precision for precision in options.precisions if precision not in slow]
    for work in works(options) if usual else ():
        yield of_work(work, usual, options.threads, options)
    for work in works(options, slow=True) if slow and not options.arguments.compiled else ():
        yield of_work(work, slow, options.threads[:1], options, rounds=1)


def of_work(
    work: Work, precisions: list[str], numbers_of_threads: tuple[int, ...], options: Options, rounds: int = 15
) -> Table:
    table = Table(f"Training step: {work}", columns(options))
    form = "compiled" if options.arguments.compiled else "eager"
    for precision in precisions:
        try:
            made: tuple[dict[str, Side], Model] | None = None
            for threads in numbers_of_threads:
                torch.set_num_threads(threads)  # which compiled code is made for
                if form == "compiled":
                    made = compiled_pair(work, precision, options.device)
                elif made is None:
                    made = pair(work, precision, options.device)
                result = compare(made[0], options, threads, rounds)
                cells, data = of_sides(work, precision, *made, result, options)
                table.add(form, precision, threads, *cells, **result.data, **data)
        except torch.OutOfMemoryError:
            table.add("", precision, "", *["out of memory"] * (len(columns(options)) - 3))
            torch.cuda.empty_cache()
    return table


def columns(options: Options) -> list[str]:
    on_gpu = ["our GiB", "their GiB", "our utilisation"] if options.cuda else []
    return ["form", "dtype", "threads", "ours", "transformers, sdpa", "transformers, eager", "ratio", *on_gpu]


def of_sides(
    work: Work, precision: str, sides: dict[str, Side], model: Model, result: Comparison, options: Options
) -> tuple[list[str], dict[str, Any]]:
    """The cells of a row from the time of our step on, and what a GPU adds to its data."""
    theirs = [str(result[name]) for name in result.order[1:]]
    cells = [str(result.ours), *theirs, *[""] * (2 - len(theirs)), f"{result.ratio(result.fastest_peer):.2f}"]
    if not options.cuda:
        return cells, {}
    memory = {name: peak_memory(sides[name]) for name in ("ours", result.fastest_peer)}
    used = utilisation(model, work, result, options.dtype(precision))
    return [*cells, *(f"{size:.1f}" for size in memory.values()), f"{used:.0%}"], {"gib": memory, "utilisation": used}


def utilisation(model: Model, work: Work, result: Comparison, dtype: torch.dtype) -> float:
    return count_flops(model, work.sizes) / result.ours.median / measured_peak(dtype, torch.device("cuda"))


def add(parser: argparse.ArgumentParser) -> None:
    works_argument(parser)
    parser.add_argument("--compiled", action="store_true", help="both sides compiled by torch: minutes more")


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
