"""Writes and reads the description of a checkpoint: index.json, which is written last, and rank-00000.json, which lists
the fragments in the safetensors file beside it. Finds the newest valid checkpoint of a run. Reads no tensors."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError

from data_pipeline.base import packages
from data_pipeline.base.atomic import TEMPORARY_SUFFIX, fingerprint, flush, sha256, write_json
from data_pipeline.base.errors import FailedError, MissingPackage, UserError
from data_pipeline.base.json_file import PathBelow, parse_json
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.loading.stream import Mixture, changed, differences
from pretrain.config.run_config import CheckpointSection
from pretrain.engine.checkpoint import rank_file
from pretrain.engine.checkpoint.directory import candidates, step_in_name
from pretrain.models import FAMILIES, ModelConfig, parse
from pretrain.run.train_state import TrainState
from pretrain.run.world import World

FORMAT_VERSION = 2
Size = Annotated[int, Field(ge=0, lt=2**62)]
Identity = dict[str, Any]
"""The identity of a run, as JSON has it: model, tokenizer, corpora, seed and optimizer."""
INDEX = "index.json"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class File:
    """Size and checksum of a file of the checkpoint."""

    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @classmethod
    def of(cls, path: Path, progress: Callable[[], None] = lambda: None) -> "File":
        """The size and checksum of the file `path`. Calls `progress` while it reads."""
        return cls(path.stat().st_size, sha256(path, progress))

    def matches(self, path: Path, progress: Callable[[], None]) -> bool:
        """True if `path` has this content. Calls `progress` while it reads."""
        return File.of(path, progress) == self


@dataclass(frozen=True)
class Origin:
    """The facts that all checkpoints of `run` have in common, as seen by one of its ranks.

    `mixture` has the number of rows of each corpus before a position. `resumed`: the step that the run has resumed
    from. `objective`: the kind of batches of the first training corpus's objective.
    """

    run: Path
    world: World
    zero_stage: int
    identity: Identity
    config_fingerprint: str
    tokenizer: Tokenizer
    mixture: Mixture
    settings: CheckpointSection
    resumed: int | None = None
    objective: str | None = None


@dataclass(frozen=True)
class Index:
    """The content of index.json. In the file, the keys of `train_state` are beside the others.

    Attributes:
        train_state: the progress of the run when it saved the checkpoint.
        consumed: the number of consumed rows of each corpus.
        config_fingerprint: the sha256 of the resolved run file.
        files: by path below the checkpoint.
        weights: the fingerprint of the fp32 weights in use, before they were copied.
        family_from: the package that offers the model's family; "" for a family of this project.
        objective: the kind of batches that the run trains on, an objective's name; None: unknown.
    """

    train_state: TrainState
    consumed: list[NonNegativeInt]
    config_fingerprint: str
    identity: Identity
    world_size: PositiveInt
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    files: dict[PathBelow, File]
    weights: str | None = None
    family_from: str = ""
    objective: str | None = None
    format_version: int = FORMAT_VERSION

    @property
    def step(self) -> int:
        """The number of steps that the run had done."""
        return self.train_state.step

    @property
    def model(self) -> ModelConfig:
        """The model that the weights belong to."""
        return _model(self.identity)

    def __post_init__(self) -> None:
        """Raises ValueError for values that contradict each other."""
        position = self.train_state.position
        if sum(self.consumed) != position:
            raise ValueError(f"position: {position}, but the rows consumed add up to {sum(self.consumed)}")
        for rank in range(self.world_size):
            for name in (f"{rank_file(rank)}.json", f"{rank_file(rank)}.safetensors"):
                if name not in self.files:
                    raise ValueError(f"files: {name} is missing, and world_size is {self.world_size}")
        _model(self.identity, self.family_from)

    def differences(self, identity: Identity) -> list[str]:
        """How the checkpoint's run differs from `identity`, one line for each key."""
        saved = {**self.identity, "model": self.model.model_dump()}  # with settings that are newer than the checkpoint
        lines, found = [], changed(*(json.loads(json.dumps(one)) for one in (saved, identity)))
        kinds = {key.rpartition(".")[0] for key, _, _ in found if _KIND.search(key)}
        for key, old, new in found:
            if _CONTENT.fullmatch(key) and old and new:
                lines.append(f"{_key_of_content(key)} differs from the checkpoint's")
            elif _KIND.search(key) or not any(key.startswith(f"{section}.") for section in kinds):
                lines += differences({_key_of_content(key): old}, {_key_of_content(key): new})
        of_another = f"the checkpoint of step {self.step} is of another run"
        return [f"{of_another}: {line}; set it back, or {ANOTHER_RUN}" for line in lines]

    def write(self, directory: Path) -> None:
        """Writes index.json, which must be the last file of a checkpoint."""
        values = asdict(self)
        progress = values.pop("train_state")
        values = {**progress, **values}
        write_json(directory / INDEX, {**values, _CHECKSUM: _checksum(values)})


ANOTHER_RUN = "start a new run with --fresh or another run.directory"
_KIND = re.compile(r"\.(name|family)$")  # the kind of a section; if it differs, the section's other keys aren't listed
_CONTENT = re.compile(r"tokenizer_sha256|wrapper\.\w+_sha256|data\.train\.\d+\.corpus")  # checksums of content
_CHECKSUM = "checksum"  # of the index's other keys


def _key_of_content(key: str) -> str:
    """The key of the run file whose content has the checksum `key`; `key` itself if it is no checksum."""
    return "data.train.0.corpus's tokenizer" if key == "tokenizer_sha256" else key.removesuffix("_sha256")


def _checksum(values: Mapping[str, object]) -> str:
    return fingerprint({key: value for key, value in values.items() if key != _CHECKSUM})


def read(directory: Path) -> Index:
    """The index of a checkpoint. Raises UserError if there is none, FailedError if it is damaged, MissingPackage if the
    package with the model's family isn't installed."""
    path = directory / INDEX
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        is_hf = (directory / "config.json").exists()
        way_out = f", but a model of transformers; pretrain import {directory} OUT makes a checkpoint" if is_hf else ""
        raise UserError(f"{directory}: not a checkpoint: no {INDEX}{way_out}") from None
    except OSError as error:
        raise FailedError(f"{path}: can't be read: {error.strerror}") from None
    values = parse_json(content, dict[str, object], path)
    version = values.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise UserError(f"{directory}: expected format version {FORMAT_VERSION}, got {version}")
    if values.get(_CHECKSUM) != _checksum(values):
        raise FailedError(f"{path}: damaged: its checksum doesn't match its content")
    progress = {one.name: values.pop(one.name) for one in fields(TrainState) if one.name in values}
    try:
        return parse_json(json.dumps({"train_state": progress, **values}), Index, path)
    except MissingPackage as error:
        raise MissingPackage(f"{path}: {error}") from None


def _model(identity: Identity, family_from: str = "") -> ModelConfig:
    """The model of `identity`. Raises ValueError if it is missing or invalid. Raises MissingPackage if the package of
    its family isn't installed, or in another version with other settings."""
    model = identity.get("model")
    family = model.get("family") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(family, str):
        raise ValueError(f"identity.model.family: expected a name, got {family!r}")
    if family not in FAMILIES:
        lacking = packages.missing("families", family)
        raise MissingPackage(f"identity.model.family: {lacking}; {packages.installed_then(family_from)}")
    try:
        config = parse(model)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"identity.model.{'.'.join(map(str, first['loc']))}: {first['msg']}"
        if (installed := packages.offering("families", family)) != family_from:
            raise MissingPackage(f"{problem} in {installed}; {packages.installed_then(family_from)}") from None
        raise ValueError(problem) from None
    if config.vocab_size is None:
        raise ValueError("identity.model.vocab_size: missing")
    return config


def verify(
    directory: Path, index: Index, share: slice = slice(None), progress: Callable[[], None] = lambda: None
) -> None:
    """Raises FailedError naming the first file that doesn't match the index.

    `share` selects among the files, as in `selected`. `progress` is called while files are read.
    """
    missing_or_short(directory, index)
    for name in selected(index, share):
        if not index.files[name].matches(directory / name, progress):
            raise FailedError(f"{directory / name}: damaged: its checksum differs from {INDEX}'s")


def selected(index: Index, share: slice) -> list[str]:
    """The names of the files that `share` selects. All files are sorted from the largest to the smallest, so that each
    rank of a run gets one of the ranks' safetensors files."""
    return sorted(index.files, key=lambda name: (-index.files[name].bytes, name))[share]


def missing_or_short(directory: Path, index: Index) -> None:
    """Raises FailedError naming the first file that is missing or has another size than in the index."""
    for name, expected in sorted(index.files.items()):
        path = directory / name
        if not path.is_file():
            raise FailedError(f"{path}: missing from the checkpoint")
        if path.stat().st_size != expected.bytes:
            raise FailedError(f"{path}: damaged: {path.stat().st_size} bytes, {INDEX} says {expected.bytes}")


def checkpoint_in(path: Path) -> Path:
    """`path` if it is a checkpoint, else the newest valid checkpoint of the run directory `path`.

    Raises FailedError if the run has checkpoints but none of them is valid.
    """
    return path if (path / INDEX).exists() else newest(path) or path


def newest(run: Path) -> Path | None:
    """The latest checkpoint whose files all exist with the right size; None if the run has no checkpoint.

    Raises FailedError if the run has checkpoints and none of them is valid.
    """
    return first_valid(run, lambda one: damage(one, missing_or_short), *candidates(run))


def is_valid(directory: Path) -> bool:
    """True if every file of a checkpoint has the content that was written."""
    return damage(directory, verify) is None


def first_valid(
    run: Path, damage: Callable[[Path], str | None], directories: list[Path], problem: str | None
) -> Path | None:
    """The first of `directories`, the `candidates` of `run`, that isn't damaged. None if there are no directories.

    `damage(directory)` returns the damage of a checkpoint, or None. Logs the damage of each checkpoint before the one
    that is returned. Raises FailedError if every checkpoint is damaged.
    """
    found = [problem] if problem else []
    for directory in directories:
        reason = damage(directory)
        if reason is None:
            for line in found:
                logger.warning("%s; resuming from %s", line, directory)
            return directory
        found.append(reason)
    if directories:
        raise FailedError("\n".join([*found, f"{run}: no checkpoint is valid; --fresh starts a new run in its place"]))
    return None


def damage(directory: Path, check: Callable[[Path, Index], None]) -> str | None:
    """The damage of a checkpoint: of its index, or what `check` finds. None: no damage.

    Raises MissingPackage, which is no damage: an earlier checkpoint wouldn't help.
    """
    try:
        named, index = step_in_name(directory.name), read(directory)
        if named != index.step:
            return f"{directory}: damaged: its {INDEX} names step {index.step}, expected {named}"
        check(directory, index)
    except MissingPackage:
        raise
    except (UserError, OSError) as error:
        return str(error)
    return None


@dataclass(frozen=True)
class SavedFragment:
    """Elements `start` … `start` + `size` − 1 of a flattened parameter of `shape`.

    Attributes:
        scalars: the optimizer's scalars for the parameter.
        states: the names of the optimizer states with the parameter's layout.
        whole: the names of the states of other shapes, which this rank writes for the whole parameter.
    """

    start: Size
    size: Size
    shape: list[NonNegativeInt]
    scalars: dict[str, FiniteFloat] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """The content of a rank's .json file: the fragments in the safetensors file beside it, by parameter name."""

    fragments: dict[str, SavedFragment]


Files = Mapping[str, File]
"""Descriptions of files, by their path below the checkpoint."""


def write_table(directory: Path, rank: int, fragments: dict[str, SavedFragment]) -> Files:
    """Writes the table of the fragments of `rank`; returns its description."""
    path = directory / f"{rank_file(rank)}.json"
    write_json(path, Table(fragments))
    return {path.name: File.of(path)}


def write_run_index(
    directory: Path, described: Files, origin: Origin, train_state: TrainState, weights: str | None = None
) -> Index:
    """Writes the index of a run's checkpoint at `train_state`. `weights`: the fingerprint of the weights."""
    return write_index(
        directory,
        described,
        train_state=train_state,
        consumed=origin.mixture.consumed(train_state.position),
        config_fingerprint=origin.config_fingerprint,
        identity=origin.identity,
        world_size=origin.world.size,
        zero_stage=origin.zero_stage,
        weights=weights,
        objective=origin.objective,
    )


def write_index(directory: Path, described: Files, **values: Any) -> Index:
    """Writes the index, the last file of a checkpoint, with the other `values` of `Index`.

    Files that are `described` are not read again. The others are flushed to the disk and read.
    """
    files = dict(described)
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_file() and name not in {*described, INDEX} and not name.endswith(TEMPORARY_SUFFIX):
            flush(path)
            files[name] = File.of(path)
    family_from = packages.offering("families", values["identity"]["model"]["family"])
    index = Index(files=dict(sorted(files.items())), family_from=family_from, **values)
    index.write(directory)
    return index
