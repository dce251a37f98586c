"""How fast is the loader, how soon does it resume, and how much memory does one of many ranks take?

    python benchmarks/loader_at_scale.py [--shards 1000] [--ranks 512] [--workers 2]

The real pipeline builds a small corpus of the shipped text. Its training shard is then listed many times over, as hard
links: manifest and blocks are those of a large corpus, and every block is read and checked. One of many ranks loads
from it, resumed at sample 10,000,000. Memory is the process's unique set size (USS) beyond what it had before it opened
the corpus, for the loader in the process itself and in each of its worker processes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import data_pipeline
from data_pipeline.corpus import open_corpus
from data_pipeline.foundation.atomic import sha256, write_json
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import TrainingBatches
from data_pipeline.loading.stream import Stream, StreamState

SAMPLES = Path(data_pipeline.__file__).parent / "samples"
RESUME_AT = 10_000_000
LANES = 64


def build(folder: Path, rows_per_block: int) -> Path:
    config: dict[str, Any] = {
        "name": "scale",
        "output": str(folder / f"corpus-{rows_per_block}"),
        "sources": [
            {"format": "c4", "path": str(SAMPLES / "c4-*.json.gz"), "language": "en"},
            {"format": "wikipedia", "path": str(SAMPLES / "enwiki-*.bz2"), "language": "en"},
        ],
        "cleaning": {"profile": "none"},
        "tokenizer": {"vocab_size": 4000, "sample_documents": 500},
        "shards": {"rows_per_block": rows_per_block, "blocks_per_shard": 1_000_000},
    }
    path = folder / "corpus.yaml"
    path.write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "data_pipeline", "build", str(path)], check=True, stdout=subprocess.DEVNULL)
    return Path(config["output"])


def multiply(corpus: Path, copies: int) -> Path:
    """Makes a corpus that lists the training shard of `corpus` `copies` times."""
    many = corpus.with_name(f"{corpus.name}-{copies}")
    shutil.copytree(corpus, many, ignore=shutil.ignore_patterns("shards", ".stages", "documents"))
    (many / "shards/train").mkdir(parents=True)
    manifest = json.loads((corpus / "manifest.json").read_text())
    train = manifest["splits"]["train"]
    (shard,) = train["shards"]
    blocks = [block for block in pq.read_table(corpus / "blocks.parquet").to_pylist() if block["split"] == "train"]
    table = []
    for number in range(copies):
        name = f"shards/train/shard-{number:05d}.tar"
        os.link(corpus / shard["name"], many / name)
        table += [
            {**block, "shard": name, "first_row": block["first_row"] + number * train["rows"]} for block in blocks
        ]
    pq.write_table(pa.Table.from_pylist(table), many / "blocks.parquet")
    manifest["splits"] = {"train": {**train, "rows": train["rows"] * copies}}
    manifest["blocks"]["sha256"] = sha256(many / "blocks.parquet")
    del manifest["sha256"]
    write_json(many / "manifest.json", manifest, sealed=True)
    return many


def stream(directory: Path) -> Stream:
    return Stream([open_corpus(directory)], [1.0], seed=0, interleaved=LANES)


def speed(directory: Path, workers: int, micro_batch: int = 64, steps: int = 300) -> float:
    """Rows per second and core of a single rank that loads all rows."""
    batches = TrainingBatches(stream(directory), BatchLayout(0, 1, micro_batch, 1))
    loaded = batches.loader(steps, workers)
    for _ in range(steps // 3):  # workers have started, blocks are cached
        next(loaded)
    started = time.perf_counter()
    rows = sum(len(batch["labels"]) for step in loaded for batch in step)
    return rows / (time.perf_counter() - started) / max(1, workers)


def resume(directory: Path) -> float:
    """Seconds from an open corpus to the first batch at `RESUME_AT`."""
    corpus = stream(directory)
    started = time.perf_counter()
    batches = TrainingBatches(corpus, BatchLayout(0, 1, 64, 1), StreamState.at(corpus, RESUME_AT, []))
    next(batches.loader(1, 0))
    return time.perf_counter() - started


def memory(directory: Path, ranks: int, workers: int) -> list[float]:
    """USS in MB: what the loader adds in the rank itself, and the total of each worker."""
    process = psutil.Process()
    before = process.memory_full_info().uss
    corpus = stream(directory)
    batches = TrainingBatches(corpus, BatchLayout(ranks // 2, ranks, 4, 1), StreamState.at(corpus, RESUME_AT, []))
    loaded = batches.loader(200, workers)
    for _ in range(150):
        next(loaded)
    children = [child.memory_full_info().uss for child in process.children(recursive=True)]
    own = [process.memory_full_info().uss - before]
    return [round(size / 1e6) for size in own + sorted(children)[-workers:]] if workers else [round(own[0] / 1e6)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small = build(Path(folder), rows_per_block=32)
        many, large_blocks = multiply(small, arguments.shards), multiply(build(Path(folder), 1024), arguments.shards)
        corpus = open_corpus(many)
        title = (
            f"{arguments.shards:,} shards, {len(corpus.blocks('train').rows):,} blocks, {corpus.rows('train'):,} rows"
        )
        table = Table("what", "figure", title=title)
        for workers in (0, arguments.workers):
            figure = f"{speed(large_blocks, workers):,.0f} rows per second and core"
            table.add_row(f"loader, blocks of 1,024 rows of 568 tokens, {workers} workers", figure)
        table.add_row(f"resume at sample {RESUME_AT:,}", f"{1000 * resume(many):.0f} ms")
        table.add_row(f"memory of one of {arguments.ranks} ranks", f"{memory(many, arguments.ranks, 0)[0]} MB")
        with_workers = memory(many, arguments.ranks, arguments.workers)
        table.add_row(
            f"the same with {arguments.workers} workers: rank, workers", ", ".join(f"{n} MB" for n in with_workers)
        )
    Console().print(table)


if __name__ == "__main__":
    main()
