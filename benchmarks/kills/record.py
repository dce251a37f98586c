"""What each script of this folder writes: a line for each step, and the weights in the end."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

LINES, WEIGHTS = "steps.jsonl", "weights.pt"


class Record:
    """The record of a run in `folder`, which all attempts of the run continue."""

    def __init__(self, folder: Path):
        self._folder = folder
        path = folder / LINES
        is_cut = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if is_cut:
            self._file.write("\n")  # the last attempt was killed within a line

    def step(self, number: int, rows: Iterable[int | str], loss: float) -> None:
        """Writes the line of step `number`, from 1: the ids of its rows, and its loss."""
        line = {"step": number, "rows": list(rows), "loss": loss, "time": time.time()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def weights(self, tensors: Mapping[str, Any]) -> None:
        """Writes the final weights."""
        whole = {name: tensor.detach().float() for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        torch.save(whole, self._folder / "weights.part")
        (self._folder / "weights.part").replace(self._folder / WEIGHTS)
