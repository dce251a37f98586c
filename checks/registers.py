"""What attention's kernels take of a GPU, compiled ahead of time: docs/results/attention/registers.csv.

    python -m checks.registers

In bf16, with the tiles that training takes. It needs no GPU, and minutes.
"""

import csv
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pretrain.kernels.tiles import TILES, tile_sizes
from tests.pretrain.compiled_kernels import KERNELS, OF_FAMILIES, compiled, usage

FILE = Path(__file__).parents[1] / "docs/results/attention/registers.csv"
GRADIENTS = ("queries' and the bias's gradients", "keys' and values' gradients")
NAMES = dict(zip(KERNELS, ("forward", *GRADIENTS), strict=True))
GPUS = {80: "A100", 90: "H100"}


def rows(folder: Path) -> Iterator[list[str | int]]:
    for architecture, kernels in TILES.items():
        for kernel in kernels:
            for d_kv in kernels[kernel]:
                tiles = tile_sizes(kernel, torch.bfloat16, d_kv, architecture)
                taken = (
                    usage(compiled(kernel, architecture, tiles, torch.bfloat16, d_kv, form), folder)
                    for form in OF_FAMILIES
                )
                shape = f"{tiles.rows} × {tiles.columns}, {tiles.warps}, {tiles.stages}"
                yield [GPUS[architecture], NAMES[kernel], d_kv, shape, *map(max, zip(*taken, strict=True))]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, FILE.open("w", encoding="utf-8", newline="") as file:
        os.environ["TRITON_CACHE_DIR"] = folder
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["GPU", "kernel", "numbers a head", "tiles", "registers", "spilled bytes", "shared bytes"])
        writer.writerows(rows(Path(folder)))


if __name__ == "__main__":
    main()
