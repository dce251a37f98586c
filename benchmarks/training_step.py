"""Is a training step faster than transformers'?

    python benchmarks/training_step.py [--device cuda] [--threads 1 2] [--precision bf16 fp32] [--compiled]

Forward and backward of the mean loss, without an optimizer, of models with the same weights on the same tokens without
padding, in the same process, in turns. The peer is transformers in the faster of its two forms of attention. The
share of products is the time of the step's bare matrix products, as `products.py` takes it, in that of our step.
"""

import argparse
from collections.abc import Iterator

from harness import Options, Table, compare, main
from peers import CPU_WORK, Work, pair

LIMIT = """"""


def measure(options: Options) -> Iterator[Table]:
    for work in works(options):
        table = Table(str(work), ["form", "dtype", "threads", "ours", "sdpa", "eager", "ratio"])
        for precision in options.precisions:
            sides, _ = pair(work, precision, options.device)
            for threads in options.threads:
                result = compare(sides, options, threads)
                peer = result.fastest_peer
                theirs = [result[name] for name in result.order[1:]]
                ratio = f"{result.ratio(peer):.2f}"
                table.add("eager", precision, threads, result.ours, *theirs, ratio, **result.data)
        yield table


def works(options: Options) -> tuple[Work, ...]:
    chosen = options.arguments.models
    return tuple(work for work in CPU_WORK if not chosen or work.config in chosen)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", help="of configs/models; by default all")
    parser.add_argument("--compiled", action="store_true", help="compiled by torch, which takes minutes more")


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
