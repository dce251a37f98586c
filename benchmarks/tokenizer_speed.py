"""How fast does each kind of tokenizer encode and decode on one core, beside the library that others use for it?

    python benchmarks/tokenizer_speed.py [--rounds 7] [--csv FILE]

The text is the shipped sample of C4, in one batch as a build has it. For `ids`, it is the list of the code points
mod 256 of each page, as a build reads it. MB count UTF-8, and seconds are the processor's. Vocabularies are made from
the same text: sentencepiece and BPE of 4,000 tokens. All sides take turns in each round; a cell has the median of the
rounds, and half the distance between their quartiles.
"""

import argparse
import csv
import gzip
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import sentencepiece
from rich.console import Console
from rich.table import Table

import data_pipeline
from data_pipeline.corpus.tokenizer.bpe import BPEConfig
from data_pipeline.corpus.tokenizer.byt5 import Bytes
from data_pipeline.corpus.tokenizer.ids import Ids
from data_pipeline.corpus.tokenizer.sentencepiece import MODEL, SentencePieceConfig
from data_pipeline.corpus.tokenizer.symbols import SymbolsConfig
from data_pipeline.corpus.tokenizer.text_model import TextModel

SAMPLE = Path(data_pipeline.__file__).parent / "samples/c4-train.00000-of-01024-first1000.json.gz"
TOKENS = 4000
WORDS = r"\s|\w+|[^\w\s]"
SHORTEST = 0.2  # s: shorter work is repeated within a round
SIDES = ("encode", "library's encode", "decode", "library's decode")
COLUMNS = ("kind", "library", *SIDES, "encode beside the library's", "bytes a token")
Work = Callable[[], object]


def kinds(texts: Sequence[str]) -> dict[str, TextModel]:
    """The model of each kind, made from `texts`."""
    sample = [text.encode() for text in texts]
    identity = SentencePieceConfig(vocab_size=TOKENS, normalization="identity")
    return {
        "sentencepiece": SentencePieceConfig(vocab_size=TOKENS).train(sample),
        "sentencepiece, identity": identity.train(sample),
        "bpe": BPEConfig(vocab_size=TOKENS).train(sample),
        "symbols, characters": SymbolsConfig().train(sample),
        f"symbols, {WORDS}": SymbolsConfig(pattern=WORDS).train(sample),
        "bytes": Bytes(),
        "ids": Ids(256),
    }


def sides_of(model: TextModel, texts: list[str]) -> tuple[str, dict[str, Work]]:
    """The library beside the model, "" if none has the kind, and the work of each side."""
    ids = model.encode(texts)
    sides: dict[str, Work] = {
        "encode": lambda: model.encode_to_arrays(texts),
        "decode": lambda: [model.decode(one) for one in ids],
    }
    if isinstance(model, Ids):
        return "", sides
    if MODEL in model.files:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.files[MODEL])
        sides["library's encode"] = lambda: processor.encode(texts, num_threads=1)
        sides["library's decode"] = lambda: processor.decode(ids, num_threads=1)
        return "sentencepiece", sides
    backend = model.backend()
    sides["library's encode"] = lambda: backend.encode_batch_fast(texts, add_special_tokens=False)
    sides["library's decode"] = lambda: backend.decode_batch(ids)
    return "tokenizers", sides


def seconds_of(work: Work) -> float:
    """The processor's seconds of a call: the mean of calls that together take 0.2 s or more."""
    calls, start = 0, time.process_time()
    while not calls or time.process_time() - start < SHORTEST:
        work()
        calls += 1
    return (time.process_time() - start) / calls


def spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    return f"{middle:,.{digits}f} ± {(high - low) / 2:,.{digits}f}"


def row_of(name: str, model: TextModel, texts: list[str], rounds: int) -> list[str]:
    """A row of the table."""
    size = sum(len(text.encode()) for text in texts) / 1e6
    library, sides = sides_of(model, texts)
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for work in sides.values():  # once before the clock runs
        work()
    for number in range(rounds):
        order = [*sides] if number % 2 else [*reversed(sides)]
        for side in order:
            speeds[side].append(size / seconds_of(sides[side]))
    ratio = ""
    if library:
        pairs = zip(speeds["encode"], speeds["library's encode"], strict=True)
        ratio = spread([ours / theirs for ours, theirs in pairs])
    tokens = sum(map(len, model.encode(texts)))
    cells = (spread(speeds[side]) if side in speeds else "" for side in SIDES)
    return [f"`{name.replace('|', chr(92) + '|')}`", library, *cells, ratio, f"{1e6 * size / tokens:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    numbers = [" ".join(str(ord(character) % 256) for character in text) for text in texts]
    before, rows = os.getloadavg()[0], list[list[str]]()
    for name, model in kinds(texts).items():
        rows.append(row_of(name, model, numbers if isinstance(model, Ids) else texts, arguments.rounds))
    table = Table(*COLUMNS, title=f"MB a core-second, {arguments.rounds} rounds")
    for row in rows:
        table.add_row(*row)
    Console().print(table, f"{os.cpu_count()} cores, load {before:.1f} before and {os.getloadavg()[0]:.1f} after")
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
