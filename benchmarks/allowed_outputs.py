"""What does `pretrain generate --allowed` cost in each step?

    python benchmarks/allowed_outputs.py [--seconds 1]

There are 200,000 allowed outputs, each of four ids, one of 256 for each place, as items of a recommender have. A step
masks the scores of all hypotheses and follows the ids that were chosen. Beside it is the rest of a step's work on the
scores, which beam search has without `--allowed`, too: log-softmax and the best 2 · beams. The model's own time comes
on top.
"""

from collections.abc import Iterator

import numpy as np
import torch
from harness import Options, Table, compare, main

from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.ids import Ids
from pretrain.evaluate.generation.allowed import AllowedOutputs

LIMIT = """At the first two places each hypothesis may have 256 ids, which are written into its mask one by one; at the
later ones there are few. With 10 hypotheses, a handful of calls of PyTorch on small tensors takes the time."""
OUTPUTS, CODES, PLACES = 200_000, 256, 4
BATCHES = ((1, 10), (32, 20))  # (texts, beams)
COLUMNS = ["texts × beams", "place", "mask and follow", "log-softmax and the best", "share of a step on scores"]


def measure(options: Options) -> Iterator[Table]:
    draws = np.random.default_rng(0)
    codes = draws.integers(0, CODES, (OUTPUTS, PLACES)) + CODES * np.arange(PLACES)
    tokenizer = Tokenizer(Ids(CODES * PLACES))
    allowed = AllowedOutputs(codes.tolist(), tokenizer)
    trie, table = allowed.trie, Table(f"{allowed.number:,} different outputs, one thread", COLUMNS)
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

            found = compare({"mask": step, "rest": rest}, options)
            share = 1 / (1 + found.ratio("rest"))
            table.add(f"{texts} × {beams}", place + 1, *found.times.values(), f"{share:.0%}", **found.data)
            nodes = trie.after(nodes, chosen)
    yield table


if __name__ == "__main__":
    main(__doc__, measure, LIMIT)
