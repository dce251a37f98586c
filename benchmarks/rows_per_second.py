"""How many rows per second does one core read and corrupt? Blocks and vectorised noise beside a key for each row.

    python benchmarks/rows_per_second.py [--rows 8192]

Both layouts hold the same rows of 568 tokens in WebDataset tars and give T5's inputs and targets. Training uses blocks.
The usual layout has one tar sample (key) per row, decoded by WebDataset and corrupted row by row.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import webdataset
from rich.console import Console
from rich.table import Table

from data_pipeline.corpus.blocks import count_rows, rows_in
from data_pipeline.objectives import Padded, SpanCorruption
from data_pipeline.objectives.randomness import noise_keys
from data_pipeline.text.vocabulary import Vocabulary

ROWS_PER_BLOCK = 1024
T5 = Vocabulary(32_100, (3, 32_000), pad=0, eos=1, unk=2, first_sentinel=32_099, sentinels=100)
OBJECTIVE = SpanCorruption()


def write_blocks(path: Path, rows: np.ndarray) -> None:
    with webdataset.TarWriter(path.open("wb"), mtime=0) as writer:
        for start in range(0, len(rows), ROWS_PER_BLOCK):
            part = rows[start : start + ROWS_PER_BLOCK]
            offsets = np.arange(0, part.size + 1, rows.shape[1])
            writer.write({"__key__": f"{start:012d}", "tokens.npy": part.reshape(-1), "row_offsets.npy": offsets})


def write_rows(path: Path, rows: np.ndarray) -> None:
    with webdataset.TarWriter(path.open("wb"), mtime=0) as writer:
        for number, row in enumerate(rows):
            writer.write({"__key__": f"{number:012d}", "tokens.npy": row})


def from_blocks(path: Path, batch: int) -> int:
    done = 0
    for sample in webdataset.WebDataset(str(path), shardshuffle=False).decode():
        first = int(sample["__key__"])
        block = {name.removesuffix(".npy"): sample[name] for name in ("tokens.npy", "row_offsets.npy")}
        count = count_rows(block)
        for start in range(0, count, batch):
            chosen = np.arange(start, min(start + batch, count))
            rows = rows_in([block] * len(chosen), chosen.tolist())
            OBJECTIVE.apply(rows, noise_keys(0, "train", 0, first + chosen), T5, {})
            done += len(chosen)
    return done


def from_rows(path: Path, batch: int) -> int:
    done = 0
    for number, sample in enumerate(webdataset.WebDataset(str(path), shardshuffle=False).decode()):
        keys = noise_keys(0, "train", 0, np.array([number]))
        OBJECTIVE.apply(Padded.full(sample["tokens.npy"][None]), keys, T5, {})
        done += 1
    return done


def rate(read: Callable[[Path, int], int], path: Path, repetitions: int = 3) -> float:
    best = 0.0
    for _ in range(repetitions):
        started = time.perf_counter()
        best = max(best, read(path, 64) / (time.perf_counter() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    rows = (
        np.random.default_rng(0).integers(3, 32_000, (parser.parse_args().rows, OBJECTIVE.raw_length)).astype(np.uint16)
    )
    with tempfile.TemporaryDirectory() as folder:
        blocks, single = Path(folder) / "blocks.tar", Path(folder) / "rows.tar"
        write_blocks(blocks, rows)
        write_rows(single, rows)
        table = Table(
            "layout", "rows per second", "bytes per raw byte", title=f"{len(rows):,} rows of {rows.shape[1]} tokens"
        )
        for name, path, read in (("blocks", blocks, from_blocks), ("a key for each row", single, from_rows)):
            table.add_row(name, f"{rate(read, path):,.0f}", f"{path.stat().st_size / rows.nbytes:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
