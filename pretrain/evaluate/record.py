"""Writes the tables and images of hooks to a folder. A run's folder is RUN/artifacts/evaluation, which MLflow gets.

NAME.json                 a table in MLflow's form, with the rows of all steps
NAME/step-00001000.png    an image
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.base.atomic import strict_json, write_bytes, write_json
from data_pipeline.base.json_file import read_valid_json
from pretrain.run import ARTIFACTS_DIRECTORY

if TYPE_CHECKING:
    from matplotlib import figure as figures

    from pretrain.evaluate.hook import EvalResult, Row  # which imports torch: `pretrain picture` needs this module


@dataclass
class _Table:
    columns: list[str]
    data: list[list[Any]]


def directory(run: Path) -> Path:
    """The folder of the run in `run`."""
    return run / ARTIFACTS_DIRECTORY / "evaluation"


def keep(folder: Path, step: int, result: "EvalResult", resumes: bool = True) -> None:
    """Adds the tables and images of the evaluation after `step` steps. They replace those of `step`.

    `resumes`: rows of later steps are dropped, since a run that has resumed takes those steps again.
    """
    for name, rows in result.tables.items():
        path = folder / f"{name}.json"
        there = table(path)
        later = [] if resumes else [row for row in there if row["step"] > step]
        rows = [*(row for row in there if row["step"] < step), *({"step": step, **row} for row in rows), *later]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        data = strict_json([[row.get(column) for column in columns] for row in rows])
        write_json(path, {"columns": columns, "data": data})
    for name, figure in result.images.items():
        write_bytes(folder / name / f"step-{step:08d}.png", png(figure))


def table(path: Path) -> "list[Row]":
    """The rows of a table; [] if the file is missing or damaged."""
    found = read_valid_json(path, _Table)
    return [dict(zip(found.columns, values, strict=True)) for values in found.data] if found else []


def new_figure(width: float, height: float) -> "figures.Figure":
    """An empty figure of this size in inches."""
    from matplotlib import figure as figures  # 0.9 s and 46 MB, for runs with pictures alone

    return figures.Figure(figsize=(width, height), layout="constrained")


def png(figure: "figures.Figure") -> bytes:
    """The image of a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    return buffer.getvalue()
