"""Tensors in files of a memory file system, where another process finds them when this one has ended."""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from pretrain.checkpoint import rank_file

_SMALL = 2**20  # bytes; smaller tensors share a file
_ALIGNED = 64


def slot_directory(node: Path, rank: int, slot: int) -> Path:
    return node / f"{rank_file(rank)}.{slot}"


@dataclass(frozen=True)
class Place:
    """Where a tensor of this shape, in fp32, begins: the number of a file of its slot and a byte in it."""

    file: int
    offset: int
    shape: list[int]


class SharedFiles:
    """Tensors in the files 0.bin, 1.bin, … of a directory; `files` has the bytes of each as a tensor."""

    def __init__(self, directory: Path):
        self.files: list[Tensor] = []
        self._directory = directory
        self._mapped: list[mmap.mmap] = []
        self._small, self._free, self._left = 0, 0, 0  # the file of small tensors: its number, first free byte, rest

    def tensor(self, like: Tensor) -> Tensor:
        """A tensor of the shape and dtype of `like`. Raises OSError if there is too little memory."""
        size = like.numel() * like.element_size()
        if not size:
            return torch.empty_like(like, device="cpu")
        if size >= _SMALL:
            return self._view(self.add(size), 0, like)
        if self._left < size:
            self._small, self._free, self._left = self.add(_SMALL), 0, _SMALL
        offset, taken = self._free, -(-size // _ALIGNED) * _ALIGNED
        self._free, self._left = self._free + taken, self._left - taken
        return self._view(self._small, offset, like)

    def add(self, size: int) -> int:
        """Adds a file of `size` bytes; returns its number. Raises OSError if there is too little memory."""
        with (self._directory / f"{len(self._mapped)}.bin").open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # else a write to a full file system would be a SIGBUS
            self._mapped.append(mmap.mmap(file.fileno(), size))
        whole = torch.frombuffer(self._mapped[-1], dtype=torch.uint8)
        if torch.cuda.is_initialized():  # so that the device copies by itself
            torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), size, 0)
        self.files.append(whole)
        return len(self.files) - 1

    def place(self, tensor: Tensor) -> Place:
        """Where `tensor`, a part of one of these, begins."""
        for number, file in enumerate(self.files):
            offset = tensor.data_ptr() - file.data_ptr()
            if 0 <= offset < file.numel():
                return Place(number, offset, list(tensor.shape))
        return Place(0, 0, list(tensor.shape))  # it has no elements

    def checksums(self) -> list[str]:
        return [xxhash.xxh3_128_hexdigest(mapped) for mapped in self._mapped]

    def _view(self, file: int, offset: int, like: Tensor) -> Tensor:
        flat = torch.frombuffer(self._mapped[file], dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)
