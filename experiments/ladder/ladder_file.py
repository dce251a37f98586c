"""The ladder file: a run file, the sizes of its rungs, and the size whose loss is predicted."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from data_pipeline.base import paths
from data_pipeline.base.config_file import Section, load, sections
from data_pipeline.base.errors import UserError

LEAST_RUNGS = 4  # one more than the law has constants
_NAME = re.compile(r"[\w-][\w.-]*")


class Rung(Section):
    """A size of the model."""

    name: str
    """The rung's name, in tables and as the folder of its runs."""
    overrides: Annotated[list[str], Field(min_length=1)]
    """What differs from the run file, as on the command line: `model.d_model=128`."""


class LadderFile(Section):
    """A ladder: the sizes of a model, how long each is trained, and the size whose loss is predicted."""

    name: str | None = None
    """The ladder's name, in ladder.json and in the default of `--out`. null: the file's name without .yaml."""
    run: Annotated[str, AfterValidator(paths.config)]
    """The run file that all rungs start from: a path relative to this file, or `configs:NAME` for one that ships with
    the package."""
    tokens_per_parameter: PositiveFloat = 20.0
    """Tokens of text that a rung reads for each of its parameters; its steps follow from that."""
    fit_over: Literal["flops", "parameters"] = "flops"
    """What the loss is fitted over. `flops`: the arithmetic of training, C. `parameters`: the size of the model, N."""
    rungs: list[Rung]
    """The sizes that the law is fitted to, four or more; best each twice as large as the one before."""
    next: Rung
    """The size whose loss is predicted."""

    @model_validator(mode="after")
    def _rungs_are_enough_and_named_apart(self) -> "LadderFile":
        problems = []
        if len(self.rungs) < LEAST_RUNGS:
            problems.append(f"rungs: {len(self.rungs)} given; a law with three constants needs at least {LEAST_RUNGS}")
        names = [rung.name for rung in self.all]
        problems += [f"rungs: two are named {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]
        problems += [
            f"{name!r}: expected letters, digits, - and . in a rung's name"
            for name in names
            if not _NAME.fullmatch(name)
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def all(self) -> list[Rung]:
        """The rungs, and the next one."""
        return [*self.rungs, self.next]


def read(path: Path) -> tuple[LadderFile, Path]:
    """The ladder in the file at `path`, and the path of its run file. Raises UserError, which names file and key."""
    found = sections(path, [])
    if "rungs" not in found:
        kind = {"model": "a run file", "sources": "a corpus file", "groups": "an experiment file"}
        is_ = next((words for key, words in kind.items() if key in found), "another kind of file")
        raise UserError(f"{path}: is {is_}; expected a ladder file, with run, rungs and next")
    ladder = load(path, [], LadderFile)
    run = path.parent / ladder.run
    if not {"run", "model", "data"} <= sections(run, []):
        raise UserError(f"{path}: run: {ladder.run} isn't a run file")
    return ladder, run
