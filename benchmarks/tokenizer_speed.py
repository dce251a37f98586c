"""How fast does each kind of tokenizer encode and decode on one core?

    python benchmarks/tokenizer_speed.py [--seconds 2] [--json FILE]

The text is the shipped sample of C4, in batches as a build has them. MB count its UTF-8, and seconds are the
processor's. Vocabularies are made from the same text: sentencepiece and BPE of 4,000 tokens. Arrays are what a build
writes; lists are what Python code and `decode` get.
"""

import argparse
import gzip
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

import data_pipeline
from data_pipeline.corpus.tokenizer.bpe import BPEConfig
from data_pipeline.corpus.tokenizer.byt5 import Bytes
from data_pipeline.corpus.tokenizer.sentencepiece_training import SentencePieceConfig
from data_pipeline.corpus.tokenizer.symbols import SymbolsConfig
from data_pipeline.corpus.tokenizer.text_model import TextModel

SAMPLE = Path(data_pipeline.__file__).parent / "samples/c4-train.00000-of-01024-first1000.json.gz"
TOKENS = 4000
WORDS = r"\s|\w+|[^\w\s]"
KINDS: dict[str, Callable[[list[bytes]], TextModel]] = {
    "sentencepiece": lambda sample: SentencePieceConfig(vocab_size=TOKENS).train(sample),
    "sentencepiece, identity": lambda sample: SentencePieceConfig(vocab_size=TOKENS, normalization="identity").train(
        sample
    ),
    "bpe": lambda sample: BPEConfig(vocab_size=TOKENS).train(sample),
    "symbols, characters": lambda sample: SymbolsConfig().train(sample),
    f"symbols, {WORDS}": lambda sample: SymbolsConfig(pattern=WORDS).train(sample),
    "bytes": lambda sample: Bytes(),
}


def speed(work: Callable[[], object], size: int, seconds: float) -> float:
    """MB a core-second: the best of calls that together take `seconds`."""
    best, began = float("inf"), time.process_time()
    while time.process_time() - began < seconds:
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return size / 1e6 / best


def _decoded(model: TextModel, ids: Sequence[list[int]]) -> list[str]:
    return [model.decode(one) for one in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    sample = [text.encode() for text in texts]
    size = sum(map(len, sample))
    columns = ["arrays", "lists", "decode", "bytes a token"]
    table = Table("kind", *columns, title=f"MB a core-second, {size / 1e6:.1f} MB of text")
    found: dict[str, dict[str, float]] = {}
    for name, make in KINDS.items():
        model = make(sample)
        ids = model.encode(texts)
        found[name] = {
            "arrays": speed(partial(model.encode_to_arrays, texts), size, arguments.seconds),
            "lists": speed(partial(model.encode, texts), size, arguments.seconds),
            "decode": speed(partial(_decoded, model, ids), size, arguments.seconds),
            "bytes a token": size / sum(map(len, ids)),
        }
        table.add_row(name, *(f"{found[name][column]:.1f}" for column in columns))
    load = os.getloadavg()[0]
    Console().print(table, f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": load, "megabytes_per_core_second": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
