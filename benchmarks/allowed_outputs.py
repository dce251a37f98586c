"""What does `pretrain generate --allowed` cost in each step, and before the first?

    python benchmarks/allowed_outputs.py [--outputs 200000] [--rounds 7] [--csv FILE]

Each output has four ids, one of 256 for each place, as items of a recommender have. A
step masks the scores of all hypotheses and follows the ids that were chosen. Beside it is the rest of a step's work on
the scores, which beam search has without `--allowed`, too: log-softmax and the best 2 · beams. The model's own time
comes on top. Seconds are the processor's, in medians of the rounds with half the distance between their quartiles.
"""

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.ids import Ids
from pretrain.evaluate.generation.allowed import AllowedOutputs

CODES, PLACES = 256, 4
BATCHES = ((1, 10), (32, 20))  # (texts, beams)
COLUMNS = ("texts × beams", "place", "mask and follow", "log-softmax and the best", "share of a step on scores")
_SHORTEST = 0.05  # s


def seconds_of(work: Callable[[], object]) -> float:
    calls, start = 0, time.process_time()
    while not calls or time.process_time() - start < _SHORTEST:
        work()
        calls += 1
    return (time.process_time() - start) / calls


def spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles([1e3 * one for one in values], n=4, method="inclusive")
    return f"{middle:.2f} ± {(high - low) / 2:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outputs", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draws = np.random.default_rng(0)
    codes = draws.integers(0, CODES, (arguments.outputs, PLACES)) + CODES * np.arange(PLACES)
    tokenizer = Tokenizer(Ids(CODES * PLACES))
    start = time.process_time()
    allowed = AllowedOutputs(codes.tolist(), tokenizer)
    built = time.process_time() - start
    trie, rows = allowed.trie, list[list[str]]()
    for texts, beams in BATCHES:
        paths = codes[draws.integers(0, len(codes), texts * beams)]
        nodes = torch.zeros(texts * beams, dtype=torch.long)
        for place in range(PLACES):
            scores = torch.randn(texts * beams, tokenizer.size)
            chosen = torch.from_numpy(paths[:, place])

            def step(scores=scores, nodes=nodes, chosen=chosen):
                trie.only(scores, nodes)
                trie.after(nodes, chosen)

            def rest(scores=scores, texts=texts, beams=beams):
                scores.log_softmax(-1).view(texts, -1).topk(2 * beams)

            times: dict[str, list[float]] = {"mask": [], "rest": []}
            for _ in range(arguments.rounds):
                times["mask"].append(seconds_of(step))
                times["rest"].append(seconds_of(rest))
            share = statistics.median(a / (a + b) for a, b in zip(*times.values(), strict=True))
            rows.append([f"{texts} × {beams}", f"{place + 1}", *map(spread, times.values()), f"{share:.0%}"])
            nodes = trie.after(nodes, chosen)
    table = Table(*COLUMNS, title=f"{allowed.number:,} outputs, {trie.edges:,} edges, built in {built:.1f} s")
    for row in rows:
        table.add_row(*row)
    Console().print(table, f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
