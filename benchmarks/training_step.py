"""Is a training step faster than transformers'?

    python benchmarks/training_step.py [--device cuda] [--threads 1 2] [--precision bf16 fp32] [--compiled]

Forward and backward of the mean loss, without an optimizer, of models with the same weights on the same tokens without
padding, in one process, in turns. Dropout is as in each model's config. The ratio is the time of transformers, in the
faster of its two forms of attention, over ours. Compiled: our layers as `compute.compile` does it, and transformers'
whole model, by `torch.compile`. On a CPU both sides keep freed memory, as our ranks do; transformers by itself doesn't.
On a GPU the tables have the peak memory beyond the weights, and the utilisation: the model's arithmetic over what
the fastest measured product does in the same time.
"""

import argparse
from collections.abc import Iterator

import torch
from harness import Comparison, Options, Table, compare, main, peak_memory
from peers import Work, compiled_pair, pair, works, works_argument

from pretrain.metrics.throughput import measured_peak
from pretrain.models.model import Model

LIMIT = """In fp32 a step is bound by its products, which both sides compute with the same library at about the
processor's peak: what a better step can still save is the rest of it. In bf16 on a processor with AMX the products
take less than half of our step, and single operations on activations (softmax, GELU, norms, copies between the layouts
of heads) the rest; see the shares of products."""


def measure(options: Options) -> Iterator[Table]:
    for work in works(options):
        table = Table(f"Training step: {work}", columns(options))
        for precision in options.precisions:
            try:
                for threads in options.threads:
                    add_row(table, work, precision, threads, options)
            except torch.OutOfMemoryError:
                table.add("", precision, "", *["out of memory"] * (len(columns(options)) - 3))
                torch.cuda.empty_cache()
        yield table


def columns(options: Options) -> list[str]:
    on_gpu = ["our GiB", "their GiB", "our utilisation"] if options.cuda else []
    return ["form", "dtype", "threads", "ours", "transformers, sdpa", "transformers, eager", "ratio", *on_gpu]


def add_row(table: Table, work: Work, precision: str, threads: int, options: Options) -> None:
    compiled = options.arguments.compiled
    torch.set_num_threads(threads)  # which compiled code is made for
    sides, model = (compiled_pair if compiled else pair)(work, precision, options.device)
    result = compare(sides, options, threads)
    theirs = [str(result[name]) for name in result.order[1:]]
    cells = [result.ours, *theirs, *[""] * (2 - len(theirs)), f"{result.ratio(result.fastest_peer):.2f}"]
    data = result.data
    if options.cuda:
        memory = {name: peak_memory(sides[name]) for name in ("ours", result.fastest_peer)}
        used = utilisation(model, work, result, options.dtype(precision))
        cells += [*(f"{size:.1f}" for size in memory.values()), f"{used:.0%}"]
        data |= {"gib": memory, "utilisation": used}
    table.add("compiled" if compiled else "eager", precision, threads, *cells, **data)


def utilisation(model: Model, work: Work, result: Comparison, dtype: torch.dtype) -> float:
    return model.flops(work.sizes) / result.ours.median / measured_peak(dtype, torch.device("cuda"))


def add(parser: argparse.ArgumentParser) -> None:
    works_argument(parser)
    parser.add_argument("--compiled", action="store_true", help="both sides compiled by torch: minutes more")


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
