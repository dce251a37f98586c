"""What a checkpoint directory says of itself: index.json, written last. Reads no tensors."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.atomic import sha256, write_bytes
from data_pipeline.errors import FailedError, UserError
from data_pipeline.loading.stream import differences
from pretrain.models import FAMILIES

FORMAT_VERSION = 1
INDEX = "index.json"


@dataclass(frozen=True)
class Index:
    """`step`: steps done; `position`: rows consumed over all corpora, `consumed`: of each one.

    `skipped`: damaged blocks whose rows counted for nothing. `identity`: model, optimizer, tokenizer, corpora, seed;
    `config_fingerprint`: sha256 of the resolved run file.
    """

    step: int
    position: int
    consumed: list[int]
    skipped: list[dict[str, Any]]
    config_fingerprint: str
    identity: dict[str, Any]
    world_size: int
    zero_stage: int
    files: dict[str, dict[str, Any]]
    format_version: int = FORMAT_VERSION

    def differences(self, identity: dict[str, Any]) -> list[str]:
        """One line for each key in which the checkpoint is of another run than `identity`."""
        saved = {**self.identity, "model": _with_defaults(self.identity["model"])}
        found = differences(saved, json.loads(json.dumps(identity)))
        return [f"the checkpoint of step {self.step} is of another run: {line}" for line in found]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def read(directory: Path) -> Index:
    """The index of a checkpoint. Raises UserError where there is none, FailedError where it is damaged."""
    try:
        values = json.loads((directory / INDEX).read_text())
        if values.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{directory}: expected format version {FORMAT_VERSION}, got {values.get('format_version')}"
            )
        return Index(**values)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{directory}: not a checkpoint: no {INDEX}") from None
    except (ValueError, TypeError, AttributeError):
        raise FailedError(f"{directory / INDEX}: damaged: not an index of this format") from None


def verify(directory: Path, index: Index) -> None:
    """Raises FailedError naming the first file that isn't as the index says."""
    for name, expected in index.files.items():
        path = directory / name
        if not path.exists():
            raise FailedError(f"{path}: missing from the checkpoint")
        if path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
            raise FailedError(f"{path}: damaged: its checksum differs from {INDEX}'s")


def directory_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def latest(run: Path) -> Path | None:
    """The checkpoint that the run's `latest` names, None before the first."""
    try:
        name = (run / "checkpoints" / "latest").read_text().strip()
    except FileNotFoundError:
        return None
    return run / "checkpoints" / name


def set_latest(run: Path, step: int) -> None:
    write_bytes(run / "checkpoints" / "latest", (directory_of(run, step).name + "\n").encode())


def all_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def _with_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """A saved model's settings with those that came later: they stand as they did then."""
    config, _ = FAMILIES[model["family"]]
    return config.model_validate(model).model_dump()
