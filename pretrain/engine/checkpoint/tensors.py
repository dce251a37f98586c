"""Writes the tensors and buffers of a checkpoint, and reads them by name and range, whichever ranks wrote them."""

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data_pipeline.base.atomic import atomic_file, atomic_path
from data_pipeline.base.errors import FailedError, UserError, os_errors
from data_pipeline.base.formatting import first_few
from data_pipeline.base.json_file import read_json
from pretrain import models
from pretrain.engine.checkpoint import BUFFERS, index, rank_file
from pretrain.engine.checkpoint.directory import candidates
from pretrain.engine.checkpoint.index import File, Files, SavedFragment, Table, damage, first_valid, write_table
from pretrain.engine.ranks import first_value, on_rank_0
from pretrain.models.model import Model
from pretrain.run import watchdog

PARAMETER = "parameter"  # the name of the fp32 weights beside the optimizer's states
_NAMES_SHOWN = 5
_BLOCK = 1 << 22  # bytes
_BLOCKS_BETWEEN_FLUSHES = 1 << 8


def header(shapes: Mapping[str, list[int]]) -> bytes:
    """The header of a safetensors file of fp32 tensors, whose elements follow in the same order."""
    about, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        about[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_part(
    directory: Path, rank: int, image: Tensor, fragments: dict[str, SavedFragment], progress: Callable[[], None]
) -> Files:
    """Writes a rank's safetensors file with the bytes `image` (bytes,), and the table of its fragments. Returns their
    descriptions.

    The sha256 is computed while writing, so that nothing is read back. `progress` is called after each block. Blocks
    are flushed to the disk regularly, so that a slow write isn't taken for a hang.
    """
    name = f"{rank_file(rank)}.safetensors"
    content = image.numpy().data
    digest = hashlib.sha256()
    with atomic_file(directory / name) as opened:
        for number, begin in enumerate(range(0, len(content), _BLOCK), 1):
            block = content[begin : begin + _BLOCK]
            digest.update(block)
            opened.write(block)
            if number % _BLOCKS_BETWEEN_FLUSHES == 0:
                os.fsync(opened.fileno())
            progress()
    return {name: File(len(content), digest.hexdigest()), **write_table(directory, rank, fragments)}


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file. Raises OSError if the disk refuses."""
    with atomic_path(path) as temporary, os_errors():
        save_file(tensors, temporary)


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file of flattened fp32 tensors, whatever the type of `weights`.

    One block at a time is converted, so that weights of another type, which may be mapped from a file, take no memory.
    """
    with atomic_file(path) as opened:
        opened.write(header({name: [tensor.numel()] for name, tensor in weights.items()}))
        for tensor in weights.values():
            for block in tensor.detach().reshape(-1).split(_BLOCK // 4):
                opened.write(block.float().cpu().numpy().data)


def verify_share(stored: "StoredTensors") -> None:
    """Verifies this rank's share of the files. Raises as `StoredTensors.verify`."""
    stored.verify(slice(dist.get_rank(), None, dist.get_world_size()), watchdog.alive)


def verify_together(directory: Path, config: models.ModelConfig) -> None:
    """Raises FailedError on all ranks if a checkpoint is damaged or not of this model. Each rank verifies its share."""
    problem = None
    try:
        stored = StoredTensors(directory)
        stored.check_shapes(config, "this model")
        verify_share(stored)
    except (UserError, OSError) as error:
        problem = str(error)
    if problem := first_value(problem):
        raise FailedError(problem)


def load_weights(model: Model, directory: Path) -> None:
    """Loads a verified checkpoint's fp32 parameters into `model`, one at a time, and its buffers."""
    stored = StoredTensors(directory)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(stored.whole(PARAMETER, name))
    load_buffers(model, directory)


class StoredTensors:
    """The tensors of a checkpoint by name and range, whichever ranks wrote them.

    Raises FailedError if files are missing or the ranks' tables are damaged. `verify` checks the content.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.index = index.read(directory)
        index.missing_or_short(directory, self.index)
        self._fragments: dict[str, list[tuple[SavedFragment, str]]] = {}  # by parameter, each with its file
        self._opened: dict[str, Any] = {}  # opening a file reads its header
        for rank in range(self.index.world_size):
            for name, fragment in read_json(directory / f"{rank_file(rank)}.json", Table).fragments.items():
                self._fragments.setdefault(name, []).append((fragment, f"{rank_file(rank)}.safetensors"))
        for name, fragments in self._fragments.items():
            if problem := _incomplete([fragment for fragment, _ in fragments]):
                raise FailedError(f"{directory}: damaged: the tables of the ranks disagree on {name}: {problem}")

    def verify(self, share: slice = slice(None), progress: Callable[[], None] = lambda: None) -> None:
        """Raises FailedError if a file doesn't match the index and the tables, or a tensor holds NaN, or a parameter
        infinity.

        `share` selects among the files, as in `index.selected`. `progress` is called while files are read.
        """
        index.verify(self.directory, self.index, share, progress)
        self.check_shapes(self.index.model, "the model it names")
        files = {*index.selected(self.index, share)}
        for name, fragments in self._fragments.items():
            for fragment, file in fragments:
                if file in files:
                    progress()
                    self._verify_tensors(name, fragment, file)

    def check_shapes(self, config: models.ModelConfig, model: str) -> None:
        """Raises FailedError for parameters that are missing, extra or misshapen, one line for each kind.

        `model`: what messages call the model of `config`.
        """
        expected = {name: tuple(parameter.shape) for name, parameter in models.meta_model(config).named_parameters()}
        found = self.shapes
        both = [name for name in expected if name in found]
        kinds = {
            "missing": [name for name in expected if name not in found],
            "extra": [name for name in found if name not in expected],
            "misshapen": [f"{one} {found[one]} for {expected[one]}" for one in both if found[one] != expected[one]],
        }
        problems = [f"{kind}: {first_few(names, _NAMES_SHOWN)}" for kind, names in kinds.items() if names]
        if problems:
            raise FailedError("\n".join(f"{self.directory}: not of {model}: {problem}" for problem in problems))

    def _verify_tensors(self, name: str, fragment: SavedFragment, file: str) -> None:
        with self._open(file) as tensors:
            for state in (PARAMETER, *fragment.states, *fragment.whole):
                elements = None if state in fragment.whole else fragment.size
                if problem := _damage(tensors.get_tensor(f"{state}/{name}"), elements, state == PARAMETER):
                    raise FailedError(f"{self.directory / file}: damaged: {state}/{name} {problem}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each whole parameter, by name."""
        return {name: tuple(fragments[0][0].shape) for name, fragments in self._fragments.items()}

    def states(self, name: str) -> list[str]:
        """The names of the optimizer's element-wise states of a parameter; empty before the first step."""
        return self._fragments[name][0][0].states

    def scalars(self, name: str) -> dict[str, float]:
        return self._fragments[name][0][0].scalars

    def factored_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer states in another shape than their parameter's, by parameter and state name."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, fragments in self._fragments.items():
            for fragment, file in fragments:
                with self._open(file) as tensors:
                    whole = {state: tensors.get_tensor(f"{state}/{name}") for state in fragment.whole}
                found |= {name: whole} if whole else {}
        return found

    def whole(self, state: str, name: str) -> Tensor:
        shape = self._fragments[name][0][0].shape
        return self.read(state, name, 0, torch.Size(shape).numel()).reshape(shape)

    def read(self, state: str, name: str, start: int, size: int) -> Tensor:
        """Elements from `start` on of the flattened parameter `name`, or of one of its states: (size,) fp32."""
        out = torch.empty(size)
        filled = 0
        for fragment, file in self._fragments.get(name, []):
            first, last = max(start, fragment.start), min(start + size, fragment.start + fragment.size)
            if first < last:
                with self._open(file) as tensors:
                    elements = slice(first - fragment.start, last - fragment.start)
                    out[first - start : last - start] = tensors.get_slice(f"{state}/{name}")[elements]
                filled += last - first
        if filled != size:
            raise FailedError(f"{self.directory}: holds {filled} of {size} elements of {state}/{name}")
        return out

    @contextlib.contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        """An open safetensors file. Raises FailedError if it can't be read, within the block too."""
        with _read(self.directory / file):
            if file not in self._opened:
                self._opened[file] = safe_open(self.directory / file, "pt")
            yield self._opened[file]


@contextlib.contextmanager
def _read(path: Path) -> Iterator[None]:
    """Within the block, a safetensors file that can't be read raises FailedError."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise FailedError(f"{path}: damaged: {error}") from None


def _incomplete(fragments: list[SavedFragment]) -> str | None:
    """Why the fragments don't make up one parameter; None if they do."""
    first = fragments[0]
    for fragment in fragments:
        if (fragment.shape, fragment.states, fragment.scalars) != (first.shape, first.states, first.scalars):
            return "shapes or states differ"
    covered = 0
    for fragment in sorted((one for one in fragments if one.size), key=lambda one: one.start):
        if fragment.start != covered:
            problem = "missing" if fragment.start > covered else "there twice"
            return f"element {min(covered, fragment.start)} is {problem}"
        covered += fragment.size
    size = math.prod(first.shape)
    return None if covered == size else f"{covered} elements for the shape {first.shape}"


def _damage(tensor: Tensor, elements: int | None, finite: bool) -> str | None:
    """The damage of a stored tensor, if any. `elements`: the expected number; None for a state with its own shape.

    `finite`: infinity is damage, too, as in a parameter. A second moment may overflow; its element then stays as it is.
    """
    if tensor.dtype != torch.float32:
        return f"is {str(tensor.dtype).removeprefix('torch.')}, expected float32"
    if elements is not None and tuple(tensor.shape) != (elements,):
        return f"has the shape {list(tensor.shape)}, expected {[elements]}"
    if tensor.isnan().any() or (finite and tensor.isinf().any()):
        return "has NaN or infinite numbers"
    return None


def model_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of `model.state_dict()`, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}


def write_buffers(buffers: Mapping[str, Tensor], directory: Path) -> None:
    """Writes the buffers that aren't all zeros, in fp32."""
    if found := {name: buffer.float().cpu().contiguous() for name, buffer in buffers.items() if buffer.any()}:
        write_tensors(found, directory / BUFFERS)


def read_buffers(directory: Path) -> dict[str, Tensor]:
    """The buffers in a checkpoint. Raises FailedError if their file is damaged."""
    path = directory / BUFFERS
    with _read(path):
        return load_file(path) if path.exists() else {}


def load_buffers(model: nn.Module, directory: Path) -> None:
    """Loads a checkpoint's buffers into `model`. Raises FailedError if the model has others."""
    own = model_buffers(model)
    for name, values in read_buffers(directory).items():
        if name not in own or own[name].shape != values.shape:
            raise FailedError(f"{directory / BUFFERS}: not of this model: {name} {tuple(values.shape)}")
        with torch.no_grad():
            own[name].copy_(values)


def newest_verified(run: Path, before: int | None = None) -> Path | None:
    """The latest checkpoint of `run` whose content is verified; None if there are no checkpoints. Raises FailedError
    if all are damaged. `before`: only checkpoints of earlier steps than this one count."""
    # on rank 0, since a network file system may show older checkpoints to other hosts
    found = on_rank_0(lambda: candidates(run, before), tuple[list[Path], str | None])
    return first_valid(run, _damage_on_any_rank, *found)


def _damage_on_any_rank(directory: Path) -> str | None:
    """The damage of a checkpoint, by the first rank that has found any. Each rank verifies its share of the files."""
    return first_value(damage(directory, lambda one, _: verify_share(StoredTensors(one))))
