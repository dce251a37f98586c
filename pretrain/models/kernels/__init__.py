"""Attention on GPUs in Triton: the constants and arguments that kernels, operator and backend share."""

from typing import NamedTuple

from torch import Tensor

GRANULE = 64  # positions per entry of the ranges of visible keys, by which a kernel skips whole tiles
MARGIN = 128  # unused diagonals on both sides of a bias: a tile that sticks out must not read another head's


class OperatorArguments(NamedTuple):
    """The arguments of the operator `encdec::flash_attention`, in the order in which PyTorch passes them. A query
    attends to `before` keys before its position and `after` keys after it; None: all keys."""

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
    def settings(self) -> tuple:
        """The numbers that the kernels take: from `before` to `dropout`."""
        return self[4:]


class Form(NamedTuple):
    """A call of the kernels: `biased` with the diagonals of a bias, `masked` with labels. The rest as they take it."""

    rows: int
    heads: int
    queries: int
    keys: int
    d_kv: int
    biased: bool
    masked: bool
    before: int | None
    after: int | None
    scale: float
    softcap: float | None
    dropout: float
