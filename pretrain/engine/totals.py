"""Scalars of a step that are summed over the ranks."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.models.functional.arithmetic import OnHost

Value = TypeVar("Value", float, Tensor)


class Totals:
    """Tables of scalars, by title and name, summed over the ranks in one collective.

    `totals["losses"]`: the sums of a table on the device. `read`: the sums of all tables on the host; only `read` waits
    for the device. All ranks create one together, with the same names and one dtype.
    """

    def __init__(self, **tables: Mapping[str, Tensor]):
        self._names = {title: list(table) for title, table in tables.items()}
        self._sums = torch.stack([value for table in tables.values() for value in table.values()])
        dist.all_reduce(self._sums)
        self._on_host = OnHost(self._sums)

    def __getitem__(self, title: str) -> dict[str, Tensor]:
        return self._named(self._sums.unbind())[title]

    def read(self) -> dict[str, dict[str, float]]:
        return self._named(self._on_host.tolist())

    def _named(self, values: Sequence[Value]) -> dict[str, dict[str, Value]]:
        named, first = {}, 0
        for title, names in self._names.items():
            named[title] = dict(zip(names, values[first : first + len(names)], strict=True))
            first += len(names)
        return named
