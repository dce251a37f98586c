"""Attention on GPUs in Triton."""

from typing import NamedTuple

from torch import Tensor

GRANULE = 64  # positions for each entry of the ranges of what is visible, which spare a kernel whole tiles
MARGIN = 128  # unused diagonals on both sides of a bias, so that a tile that sticks out reads none of another head


class KernelSettings(NamedTuple):
    """The numbers that the kernels take. A query sees `before` keys before its position and `after` after it; None:
    all."""

    before: int | None
    after: int | None
    scale: float
    softcap: float | None
    dropout: float


class OperatorArguments(NamedTuple):
    """The arguments of the operator `encdec::flash_attention`, in its order: what PyTorch hands over as a tuple."""

    sources: list[Tensor]
    diagonals: Tensor | None
    labels: list[Tensor]
    seed: Tensor | None
    before: int | None
    after: int | None
    scale: float
    softcap: float | None
    dropout: float

    @property
    def settings(self) -> KernelSettings:
        return KernelSettings(self.before, self.after, self.scale, self.softcap, self.dropout)
