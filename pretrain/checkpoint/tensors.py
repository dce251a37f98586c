"""Reading the tensors of a checkpoint, by name and range, whichever ranks wrote them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from data_pipeline.errors import FailedError
from pretrain.checkpoint import index, rank_file
from pretrain.models.model import whole_shape

PARAMETER = "parameter"  # the name of the fp32 weights beside the optimizer's states


def load_weights(model: nn.Module, directory: Path) -> None:
    """Puts a checkpoint's fp32 parameters into `model`, in its own precision, one at a time.

    All ranks that share a sharded model must call it together. Raises FailedError if the tensors differ.
    """
    stored = StoredTensors(directory)
    own = dict(model.named_parameters())
    shapes = {name: tuple(whole_shape(parameter)) for name, parameter in own.items()}
    if problems := _misfits(shapes, stored.shapes):
        raise FailedError("\n".join(f"{directory}: not of this model: {problem}" for problem in problems))
    for name, parameter in own.items():
        with torch.no_grad(), _writable(parameter) as here:
            if here:
                parameter.copy_(stored.whole(PARAMETER, name))


@contextlib.contextmanager
def _writable(parameter: nn.Parameter) -> Iterator[bool]:
    """Whether this process is to fill `parameter`: always, or rank 0 for all where ZeRO-3 has it sharded."""
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield torch.distributed.get_rank() == 0


def _misfits(wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    """What is missing, extra or misshapen, a line each."""
    both = [name for name in wanted if name in found]
    kinds = {
        "missing": [name for name in wanted if name not in found],
        "extra": [name for name in found if name not in wanted],
        "misshapen": [f"{name} {found[name]} for {wanted[name]}" for name in both if found[name] != wanted[name]],
    }
    return [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class StoredTensors:
    """The tensors of a checkpoint by name and range, whichever ranks wrote them.

    Raises FailedError where a file isn't as the index says, unless that was `verified` before.
    """

    def __init__(self, directory: Path, verified: bool = False):
        self.directory = directory
        self.index = index.read(directory)
        if not verified:
            index.verify(directory, self.index)
        self._pieces: dict[str, list[tuple[int, int, str]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._scalars: dict[str, dict[str, float]] = {}
        self._states: dict[str, list[str]] = {}
        self._whole: dict[str, tuple[str, list[str]]] = {}
        for rank in range(self.index.world_size):
            table = json.loads((directory / f"{rank_file(rank)}.json").read_text())
            file = f"{rank_file(rank)}.safetensors"
            for name, piece in table["fragments"].items():
                self._pieces.setdefault(name, []).append((piece["start"], piece["size"], file))
                self._shapes[name] = tuple(piece["shape"])
                self._scalars[name] = piece["scalars"]
                self._states[name] = piece["states"]
                if piece["whole"]:
                    self._whole[name] = (file, piece["whole"])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def states(self, name: str) -> list[str]:
        """What the optimizer's element-wise states of a parameter are called; none before the first step."""
        return self._states[name]

    def scalars(self, name: str) -> dict[str, float]:
        return self._scalars[name]

    def factored_state(self) -> dict[str, dict[str, Tensor]]:
        """What the optimizer keeps in another shape than the parameters', by parameter and its own name."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, (file, states) in self._whole.items():
            with safe_open(self.directory / file, "pt") as tensors:
                found[name] = {state: tensors.get_tensor(f"{state}/{name}") for state in states}
        return found

    def whole(self, state: str, name: str) -> Tensor:
        shape = self._shapes[name]
        return self.read(state, name, 0, torch.Size(shape).numel()).reshape(shape)

    def read(self, state: str, name: str, start: int, size: int) -> Tensor:
        """(size,) fp32: elements from `start` on of the flattened parameter `name`, or of a state of it."""
        out = torch.empty(size)
        filled = 0
        for piece_start, piece_size, file in self._pieces.get(name, []):
            first, last = max(start, piece_start), min(start + size, piece_start + piece_size)
            if first < last:
                piece = self._slice(file, f"{state}/{name}", slice(first - piece_start, last - piece_start))
                out[first - start : last - start] = piece
                filled += last - first
        if filled != size:
            raise FailedError(f"{self.directory}: holds {filled} of {size} elements of {state}/{name}")
        return out

    def _slice(self, file: str, tensor: str, elements: slice) -> Tensor:
        try:
            with safe_open(self.directory / file, "pt") as tensors:
                return tensors.get_slice(tensor)[elements]
        except SafetensorError as error:
            raise FailedError(f"{self.directory / file}: damaged: {error}") from None
