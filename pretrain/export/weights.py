"""Reads the weights in a Hugging Face directory, and checks that a config fits them."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.formatting import printable
from data_pipeline.base.json_file import PathBelow, read_json
from pretrain.export import flax_file, torch_file
from pretrain.models import ModelConfig, meta_model
from pretrain.models.state_dict_adapter import Json, State, few

ADAPTER = "adapter_config.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_FLOATS = ("F64", "F32", "F16", "BF16")
_OTHERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")  # masks and positions beside the weights
_DEPTHS = ("num_layers", "num_encoder_layers", "num_decoder_layers")
_LAYER = re.compile(r"(.+?)\.(\d+)\.")


@dataclass(frozen=True)
class _Index:
    """The index of sharded weights: the file of each tensor."""

    weight_map: dict[str, PathBelow]


def read(directory: Path) -> State:
    """The tensors of the model, from the first of the formats in FORMATS that is there. Weights have the file's
    floating-point type, so that they stay mapped; fp32 if it has several.

    Raises UserError if there are no weights, or for tensors that aren't plain numbers; FailedError if a file is
    damaged, or has infinite numbers, NaN or numbers beyond fp32's range.
    """
    tensors: State = {}
    read_file, paths = _files(directory)
    for path in paths:
        stored = read_file(path)
        refuse_infinite(stored, path)
        tensors |= stored
    types = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return in_fp32(tensors) if len(types) > 1 else tensors


def _safetensors(path: Path) -> State:
    try:
        with safe_open(path, "pt") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
            wrong = sorted(name for name, kind in kinds.items() if kind not in (*_FLOATS, *_OTHERS))
            stored = {} if wrong else {name: file.get_tensor(name) for name in kinds}
    except Exception as error:
        raise FailedError(f"{path}: damaged: {printable(str(error))}") from None
    if wrong:
        found = f"{printable(wrong[0])} is of {kinds[wrong[0]]}, expected {', '.join(_FLOATS)}"
        raise UserError(f"{path}: {found}: quantized weights can't be imported")
    return stored


# The formats that are read, the preferred ones first. Each is a file, or the shards that its index names.
FORMATS: dict[str, Callable[[Path], State]] = {
    "model.safetensors": _safetensors,
    "pytorch_model.bin": torch_file.read,
    "flax_model.msgpack": flax_file.read,
}


def in_fp32(tensors: Mapping[str, Tensor]) -> State:
    """The tensors, with floating-point numbers in fp32."""
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def refuse_infinite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises FailedError for tensors of the file `path` with infinite numbers, NaN or numbers beyond fp32's range."""
    if wrong := sorted(name for name, tensor in tensors.items() if not _is_finite(tensor)):
        names = ", ".join(map(printable, wrong[:8]))
        raise FailedError(f"{path}: damaged: infinite numbers or NaN in {names}")


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite in fp32. Compares the extremes alone: `isfinite` of all elements takes more memory
    than the tensor."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return all(bool(extreme.float().isfinite()) for extreme in tensor.aminmax())


def _files(directory: Path) -> tuple[Callable[[Path], State], list[Path]]:
    """The files to read, and the function that reads them: a file of FORMATS, or else the files in its index. Other
    files are ignored: model.ema.safetensors, for example, is a variant of the model.
    """
    if (adapter := directory / ADAPTER).exists():
        raise UserError(f"{adapter}: weights in an adapter can't be imported; merge it into the model first")
    for name, read_file in FORMATS.items():
        if (directory / name).exists():
            return read_file, [directory / name]
        index = directory / f"{name}.index.json"
        if index.exists():
            files = [directory / file for file in sorted({*read_json(index, _Index).weight_map.values()})]
            if gone := [path for path in files if not path.exists()]:
                raise UserError(f"{printable(str(gone[0]))}: no such file, but {index.name} names it")
            return read_file, files
    found = sorted(printable(path.name) for path in directory.iterdir() if path.suffix in _WEIGHT_FILES)
    expected = ", ".join([*FORMATS][:-1])
    raise UserError(
        f"{directory}: expected {expected} or {[*FORMATS][-1]}, or the index of its shards, found "
        f"{', '.join(found) or 'no weights'}. To import a variant, rename it. Save other formats "
        "again with transformers' save_pretrained"
    )


def check_depths(settings: Json, stored: Iterable[str], keys: Mapping[str, str] | None, path: Path) -> None:
    """Raises UserError if `settings`, from the file `path`, have more layers than the tensors named `stored`:
    transformers would build them all.

    `keys`: the key in `settings` of each setting of ours; None: `settings` has our names.
    """
    numbered = defaultdict(set)
    for name in stored:
        if layer := _LAYER.match(name):
            numbered[layer[1]].add(layer[2])
    layers = max(map(len, numbered.values()), default=0)
    depths = {name if keys is None else keys.get(name) for name in _DEPTHS}
    for key, value in _leaves(settings):
        if key.rpartition(".")[2] in depths and isinstance(value, int) and value > layers:
            raise UserError(f"{path}: {key} is {value}, but there are weights of {layers} layers")


def _leaves(settings: Json, above: str = "") -> Iterator[tuple[str, Any]]:
    """All values in `settings` and its sections, with their paths."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of the model's `state_dict()`; a tied matrix appears under each of its names."""
    return sizes(meta_model(config).state_dict())


def sizes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], what: str = "the weights don't fit"
) -> None:
    """Raises UserError if tensors are missing, unexpected, of the wrong shape or not floating-point. `what` begins the
    line."""
    both, found = sorted(expected.keys() & tensors.keys()), sizes(tensors)
    problems = [
        *(f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())),
        *(f"{printable(name)} is not of the model" for name in sorted(tensors.keys() - expected.keys())),
        *(f"{name} should be {expected[name]}, is {found[name]}" for name in both if found[name] != expected[name]),
        *(
            f"{name} is of {str(tensors[name].dtype).removeprefix('torch.')}, not of floating-point numbers"
            for name in both
            if not tensors[name].is_floating_point()
        ),
    ]
    if problems:
        raise UserError(f"{what}: {few(problems, '; ')}")
