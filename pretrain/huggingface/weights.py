"""The weights in a Hugging Face directory: what the headers of its safetensors files say, and the tensors in fp32."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import printable
from data_pipeline.foundation.json_file import read_json
from pretrain.huggingface.conversion import Json, Shapes, State

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_FLOATS = ("F64", "F32", "F16", "BF16")
_OTHERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")  # masks and positions beside the weights


def shapes_of(directory: Path) -> Shapes:
    """The shapes of the tensors that transformers loads, from the headers of their files.

    Raises UserError if there are none or their numbers are of a kind that no weights here have, such as float8;
    FailedError if a file is damaged.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path, names in _files(directory).items():
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                kinds = {name: tensor.get_dtype() for name, tensor in tensors.items()}
                shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
        except Exception as error:
            raise FailedError(f"{path}: damaged: {printable(str(error))}") from None
        if odd := sorted(name for name in shapes if not name.isprintable()):
            raise FailedError(f"{path}: damaged: a tensor is named {printable(odd[0])}")
        if names and (others := sorted(names ^ shapes.keys())):
            raise FailedError(f"{path}: holds other tensors than {INDEX} says: {', '.join(map(printable, others[:8]))}")
        if wrong := sorted(name for name, kind in kinds.items() if kind not in (*_FLOATS, *_OTHERS)):
            raise UserError(
                f"{path}: {wrong[0]} is of {kinds[wrong[0]]}, expected {', '.join(_FLOATS)}: "
                "quantized weights can't be imported"
            )
        found |= shapes
    return found


def read(directory: Path) -> State:
    """The tensors that transformers loads, with weights in fp32. Raises as `shapes_of` and `in_fp32` do."""
    tensors: State = {}
    for path in _files(directory):
        try:
            stored = load_file(path)
        except Exception as error:
            raise FailedError(f"{path}: damaged: {error}") from None
        tensors |= in_fp32(stored, path)
    return tensors


def in_fp32(tensors: Mapping[str, Tensor], path: Path) -> State:
    """The tensors of the file `path`, those of floating-point numbers in fp32.

    Raises FailedError if they aren't finite, UserError if some are beyond fp32's range.
    """
    converted = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    if wrong := sorted(name for name, tensor in converted.items() if not tensor.isfinite().all()):
        if all(tensors[name].isfinite().all() for name in wrong):
            raise UserError(f"{path}: numbers beyond the range of fp32 in {', '.join(wrong[:8])}")
        raise FailedError(f"{path}: damaged: infinite numbers or NaN in {', '.join(wrong[:8])}")
    return converted


def _files(directory: Path) -> dict[Path, set[str]]:
    """The files that transformers loads: model.safetensors, or else those in its index, with the names of their tensors
    there.

    Other files are ignored: model.ema.safetensors, for example, is a variant of the model.
    """
    if (directory / ADAPTER).exists():
        raise UserError(
            f"{directory / ADAPTER}: weights in an adapter can't be imported; merge it into the model first"
        )
    if (directory / WEIGHTS).exists():
        return {directory / WEIGHTS: set()}
    if not (directory / INDEX).exists():
        found = sorted(printable(path.name) for path in directory.iterdir() if path.suffix in _WEIGHT_FILES)
        raise UserError(
            f"{directory}: expected {WEIGHTS} or {INDEX}, found {', '.join(found) or 'no weights'}. To import a "
            f"variant, rename it to {WEIGHTS}. Other formats may run code when they are read: save them again "
            "with transformers' save_pretrained"
        )
    shards = {directory / file: names for file, names in _shards(directory / INDEX).items()}
    for path in shards:
        if not path.exists():
            raise UserError(f"{printable(str(path))}: no such file, but {INDEX} names it")
    return shards


def _shards(index: Path) -> dict[str, set[str]]:
    """The names of the tensors in each file that `index` lists. Raises FailedError if a file is not beside it."""
    weight_map = read_json(index, Json).get("weight_map")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items() if isinstance(weight_map, dict) else ():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise FailedError(
                f"{index}: damaged: {printable(name)} is in {file!r}, not in a *.safetensors file beside it"
            )
        shards.setdefault(file, set()).add(name)
    if not shards:
        raise FailedError(f"{index}: damaged: expected weight_map, from names of tensors to files")
    return shards
