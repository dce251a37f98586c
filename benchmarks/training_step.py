"""Is a training step faster than transformers'?

    python benchmarks/training_step.py [--threads 1 2] [--precision bf16 fp32] [--compiled]

Forward and backward of the mean loss, without an optimizer, of models with the same weights on the same tokens without
padding, in one process, in turns. Dropout is as in each model's config. The ratio is the time of transformers, in the
faster of its two forms of attention, over ours. Compiled: our layers as `compute.compile` does it, and transformers'
whole model, by `torch.compile`. On a CPU both sides keep freed memory, as our ranks do; transformers by itself doesn't.
Where a CPU has no arithmetic for bf16, steps in bf16 are small, not compiled, and taken once on one thread:
transformers needs minutes for a usual one.
"""

import argparse
from collections.abc import Iterator

import torch
from harness import Options, Side, Table, compare, main, slow
from peers import FORMS, Work, compiled_pair, pair, works, works_argument

LIMIT = """The products, which both sides compute with the same library at about the processor's peak (84 to 93 GFLOP/s
on a core with AVX2). In fp32 they are 88 to 90% of our step there: even a step of nothing else would only be 1.04 to
1.21 times as fast as transformers'. On two threads the products scale by 1.8, and so do both sides. Compiled, our step
in fp32 gains nothing over its eager form, and transformers' catches up. In bf16 the ratio depends on the processor:
where it multiplies bf16 in AMX, products take less than half of our step, and operations on activations (softmax, GELU,
norms, sums) the rest, which a compiler can fuse; where it has no arithmetic for bf16, PyTorch's products run at 1 to 9
GFLOP/s, and runs compute in fp32."""


def measure(options: Options) -> Iterator[Table]:
    emulated = [precision for precision in options.precisions if slow(precision)]
    usual = [precision for precision in options.precisions if precision not in emulated]
    for work in works(options) if usual else ():
        yield of_work(work, usual, options.threads, options)
    for work in works(options, slow=True) if emulated and not options.arguments.compiled else ():
        yield of_work(work, emulated, options.threads[:1], options, rounds=1)


def of_work(
    work: Work, precisions: list[str], numbers_of_threads: tuple[int, ...], options: Options, rounds: int = 15
) -> Table:
    peers = [f"transformers, {form}" for form in FORMS]
    table = Table(f"Training step: {work}", ["form", "dtype", "threads", "ours", *peers, "ratio"])
    form = "compiled" if options.arguments.compiled else "eager"
    for precision in precisions:
        sides: dict[str, Side] = {}
        for threads in numbers_of_threads:
            torch.set_num_threads(threads)  # which compiled code is made for
            if form == "compiled":
                sides = compiled_pair(work, precision)
            elif not sides:
                sides = pair(work, precision)
            result = compare(sides, options, threads, rounds)
            theirs = [result[peer] if peer in sides else "" for peer in peers]
            ratio = f"{result.ratio(result.fastest_peer):.2f}"
            table.add(form, precision, threads, result.ours, *theirs, ratio, **result.data)
    return table


def add(parser: argparse.ArgumentParser) -> None:
    works_argument(parser)
    parser.add_argument("--compiled", action="store_true", help="both sides compiled by torch: minutes more")


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
