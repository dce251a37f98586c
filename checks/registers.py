"""What attention's kernels take of a GPU's registers, compiled ahead of time: docs/results/attention/registers.csv.

    python -m checks.registers

In bf16, the tiles that training chooses from and some that were dropped. It needs no GPU, and minutes.
"""

import csv
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pretrain.kernels.tuning import Tiles, choices
from tests.pretrain.compiled_kernels import KERNELS, Form, compiled, usage

FILE = Path(__file__).parents[1] / "docs/results/attention/registers.csv"
GRADIENTS = ("queries' gradient", "keys' and values' gradients", "diagonals' gradient")
NAMES = dict(zip(KERNELS, ("forward", *GRADIENTS), strict=True))
SMALL = [Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3)]
DROPPED = {
    "forward": [Tiles(128, 64, 4, 3)],
    "backward_queries": [*SMALL, Tiles(128, 128, 8, 2)],
    "backward_keys": [*SMALL, Tiles(128, 128, 8, 2)],
    "backward_diagonals": [Tiles(128, 128, 8, 2)],
}
FORMS = {
    "T5's bias, 64": (Form(bias=True), 64),
    "a window, 64": (Form(window=True), 64),
    "a window and a soft cap, 256": (Form(window=True, softcap=True), 256),
}


def rows(folder: Path) -> Iterator[list[str]]:
    for attention, (form, d_kv) in FORMS.items():
        for kernel in KERNELS if form.bias else KERNELS[:-1]:
            chosen = choices(kernel, torch.bfloat16, d_kv)
            for tiles in [*chosen, *DROPPED[kernel]] if form.bias else chosen[:1]:
                taken = [
                    usage(compiled(kernel, architecture, tiles, torch.bfloat16, d_kv, form), folder)
                    for architecture in (80, 90)
                ]
                why = "fixed choice" if tiles == chosen[0] else "" if tiles in chosen else "dropped"
                shape = f"{tiles.rows} × {tiles.columns}, {tiles.warps}, {tiles.stages}"
                yield [attention, NAMES[kernel], shape, *(f"{one.registers}, {one.spilled}" for one in taken), why]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, FILE.open("w", encoding="utf-8", newline="") as file:
        os.environ["TRITON_CACHE_DIR"] = folder
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["attention", "kernel", "tiles", "A100", "H100", "choice"])
        writer.writerows(rows(Path(folder)))


if __name__ == "__main__":
    main()
