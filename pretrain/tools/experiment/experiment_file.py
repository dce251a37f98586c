"""The folder of an experiment: run files, which are its rows, and experiment.yaml, which says how to compare them."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from data_pipeline.foundation.config_file import Section, load
from data_pipeline.foundation.errors import UserError

FILE = "experiment.yaml"
_NAME = re.compile(r"[\w.-]+")


class Published(Section):
    """A publication's numbers of a row."""

    row: str
    """The row, by the name of its run file without .yaml."""
    parameters: PositiveInt | None = None
    """Trained parameters, as the publication counts them."""
    train_loss: float | None = None
    """The training loss, in nats per token."""
    validation_loss: float | None = None
    """The loss on held-out text, in nats per token."""
    embedding_loss: float | None = None
    """The auxiliary loss of the autoregressive encoder-decoder."""


class Group(Section):
    """Rows that are compared with one of them."""

    title: str
    """The group's question, above its rows in the table and its panel in the picture."""
    baseline: str
    """The row that the others are compared with."""
    rows: Annotated[list[str], Field(min_length=1)]
    """The names of run files without .yaml, in the order of the table. A row may stand in several groups."""
    metric: str | None = None
    """The metric that rows are compared by, under its own name: `infilling/NAME/bits_per_byte`. null: the validation
    loss."""

    @model_validator(mode="after")
    def _baseline_is_a_row(self) -> "Group":
        if self.baseline not in self.rows:
            raise ValueError(f"baseline: {self.baseline} is none of the rows {', '.join(self.rows)}")
        return self


class ExperimentFile(Section):
    """The file experiment.yaml in a folder of run files: how their runs are compared, and with what."""

    name: str | None = None
    """The experiment's name in MLflow. null: the folder's name."""
    groups: list[Group] = []
    """Which rows are compared. Rows in no group are compared with the first of them."""
    published: list[Published] = []
    """A publication's numbers, which the table has beside the rows."""


@dataclass(frozen=True)
class Experiment:
    """`rows`: the run files by name, those of groups first and in their order."""

    name: str
    rows: dict[str, Path]
    groups: list[Group]
    published: dict[str, Published]


def read(directory: Path) -> Experiment:
    """The experiment in `directory`. Raises UserError, which names the file and the key, if it can't be run."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder; expected one with run files")
    settings = load(directory / FILE, [], ExperimentFile) if (directory / FILE).exists() else ExperimentFile()
    files = {path.stem: path for path in sorted(directory.glob("*.yaml")) if path.name != FILE}
    if not files:
        raise UserError(f"{directory}: no run file (*.yaml) there")
    name = settings.name or directory.resolve().name
    rows = [(f"groups.{number}.rows", row) for number, group in enumerate(settings.groups) for row in group.rows]
    rows += [(f"published.{number}.row", one.row) for number, one in enumerate(settings.published)]
    problems = []
    for key, row in rows:
        if row not in files:
            nearest = "".join(f"; nearest: {name}" for name in difflib.get_close_matches(row, files, n=1))
            problems.append(f"{FILE}: {key}: {row}.yaml isn't in the folder{nearest}")
    problems += [f"{one!r}: expected letters, digits, - and ." for one in (name, *files) if not _NAME.fullmatch(one)]
    if problems:
        raise UserError("\n".join(f"{directory}: {problem}" for problem in problems))
    grouped = dict.fromkeys(row for group in settings.groups for row in group.rows)
    others = [row for row in files if row not in grouped]
    groups = list(settings.groups)
    if others:
        groups.append(Group(title="Other rows" if groups else name, baseline=others[0], rows=others))
    published = {one.row: one for one in settings.published}
    return Experiment(name, {row: files[row] for row in (*grouped, *others)}, groups, published)
