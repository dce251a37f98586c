"""How each table of docs/results follows from its data: a function a table, which returns the cells that it computes.

TABLES: Tables = {}
table = partial(register, TABLES)

@table("comparison-task")            # the page has <!-- results: comparison-task --> above the table
def _(folder): …                     # folder: docs/results

Tables of experiments are in `experiments`, of loss curves in `loss_curves`, of builds, faults and waiting in
`operations`, of GPUs in `gpu`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks.results.pages import Rows

Tables = dict[str, Callable[[Path], Rows]]  # by name


def register(tables: Tables, name: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """Makes a function one of `tables`."""

    def registered(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        assert name not in tables, name
        tables[name] = lambda folder: [list(row) for row in function(folder)]
        return function

    return registered
