"""What attention's kernels take of a GPU, compiled ahead of time: docs/results/attention/registers.csv.

    python -m checks.registers

In bf16, with the tiles that training takes. Registers, spilled bytes and shared memory are the most of the forms that
families take; the loop is that of T5's encoder with full rows. It needs no GPU, and a quarter of an hour.
"""

import csv
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pretrain.models.kernels.tiles import TILES, tile_sizes
from tests.support.compiled_kernels import KERNELS, OF_FAMILIES, PLAIN, SHARED, compiled, loops, usage

FILE = Path(__file__).parents[1] / "docs/results/attention/registers.csv"
GRADIENTS = ("queries' and the bias's gradients", "keys' and values' gradients")
NAMES = dict(zip(KERNELS, ("forward", *GRADIENTS), strict=True))
GPUS = {"A100": (80,), "RTX 3090, 4090": (86, 89), "RTX 5090": (120,), "H100": (90,)}


def rows(folder: Path) -> Iterator[list[str | int]]:
    for gpu, architectures in GPUS.items():
        offered = SHARED[architectures[0]]
        for kernel, tiles_of_widths in TILES[offered].items():
            for d_kv in tiles_of_widths:
                tiles = tile_sizes(kernel, torch.bfloat16, d_kv, offered)
                taken = (
                    usage(compiled(kernel, one, torch.bfloat16, d_kv, form), folder)
                    for one, form in itertools.product(architectures, OF_FAMILIES)
                )
                of_full_rows = (
                    loops(compiled(kernel, one, torch.bfloat16, d_kv, PLAIN), folder)[0] for one in architectures
                )
                shape = f"{tiles.rows} × {tiles.columns}, {tiles.warps}, {tiles.stages}"
                most = [*map(max, zip(*taken, strict=True)), *map(max, zip(*of_full_rows, strict=True))]
                yield [gpu, NAMES[kernel], d_kv, shape, *most]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, FILE.open("w", encoding="utf-8", newline="") as file:
        os.environ["TRITON_CACHE_DIR"] = folder
        writer = csv.writer(file, lineterminator="\n")
        taken = ("registers", "spilled bytes", "shared bytes", "instructions of the loop", "barriers of the loop")
        writer.writerow(["GPU", "kernel", "numbers a head", "tiles", *taken])
        writer.writerows(rows(Path(folder)))


if __name__ == "__main__":
    main()
