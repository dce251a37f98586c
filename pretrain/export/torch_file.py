"""Reads files of `torch.save`, such as pytorch_model.bin, and runs nothing that they name.

A pickle is a program. `torch.load(weights_only=True)` runs only what builds tensors, but it builds sparse tensors too,
and doesn't compare their indices with their shape: used later, they read and write foreign memory. So the pickle's
instructions are looked through first, and a file that calls for anything but dense tensors is refused.
"""

import io
import mmap
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.base.errors import FailedError, UserError, one_line
from data_pipeline.base.formatting import printable
from pretrain.models.state_dict_adapter import State

_ZIP = b"PK\x03\x04"  # the first bytes of a file of torch 1.6 and later
# An older file has five pickles: a number, the format's version, the machine, the tensors, the keys of their storages.
_PICKLES = 5
_KNOWN = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in ("Double", "Float", "Half", "BFloat16")),
    *(f"torch {kind}Storage" for kind in ("Long", "Int", "Short", "Char", "Byte", "Bool")),
}


def read(path: Path) -> State:
    """The tensors in `path`, by name. In files of torch 1.6 and later they are mapped, not read.

    Raises UserError, which names the tensor, for anything but dense tensors; FailedError if the file is damaged.
    """
    try:
        zipped = _look_through(path)
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UserError:
        raise
    except pickle.UnpicklingError:  # its message tells the user to allow code
        raise UserError(f"{path}: its pickle does more than build dense tensors. No code of the file was run") from None
    except Exception as error:  # zipfile, pickletools and torch raise their own exceptions for damaged files
        raise FailedError(f"{path}: damaged: {printable(one_line(error))}") from None
    if not isinstance(saved, dict):
        raise UserError(f"{path}: holds {type(saved).__name__}, expected a dictionary of tensors")
    for name, value in saved.items():
        if not isinstance(name, str):
            raise UserError(f"{path}: has the key {name!r}, expected names of tensors")
        if not _is_dense(value):
            raise UserError(f"{path}: {printable(name)} is {_kind(value)}, but only dense tensors are read")
    return {name: tensor.detach() for name, tensor in saved.items()}


def _look_through(path: Path) -> bool:
    """Raises UserError if a pickle in `path` names anything but the parts of dense tensors. True for a zip file."""
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                for _ in range(_PICKLES):
                    _look_through_pickle(content, path)
            return False
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.filename.lower().endswith("data.pkl"):
                    if record.compress_type != zipfile.ZIP_STORED:  # torch.save compresses nothing
                        raise UserError(f"{path}: {printable(record.filename)} is compressed: not a file of torch.save")
                    _look_through_pickle(io.BytesIO(archive.read(record)), path)
        return True


def _look_through_pickle(pickled: Any, path: Path) -> None:
    """Reads the instructions of the pickle at the position of `pickled`, without following them."""
    strings = ["", ""]  # the last two: before an object, the last is its key
    for instruction, argument, _ in pickletools.genops(pickled):
        key, name = strings[-1], None
        if isinstance(argument, str) and instruction.name in ("GLOBAL", "INST"):
            name = argument
        elif instruction.name == "STACK_GLOBAL":
            key, name = "", " ".join(strings)
        elif instruction.name.startswith("EXT"):
            name = f"extension {argument}"
        elif isinstance(argument, str):
            strings = [strings[-1], argument]
        if name is not None and (instruction.name != "GLOBAL" or name not in _KNOWN):
            what = printable(key) or "an object"
            named = printable(name.replace(" ", "."))
            raise UserError(
                f"{path}: {what} is made by {named}, but only dense tensors are read. No code of the file was run"
            )


def _is_dense(value: object) -> bool:
    """Whether `value` is a tensor whose elements all lie in its storage, each at a place of its own."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_nested or value.is_meta)
        and value.nbytes <= value.untyped_storage().nbytes()
    )


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a value of the type {type(value).__name__}"
    return "a tensor whose elements share memory" if value.layout == torch.strided else f"a tensor of {value.layout}"
