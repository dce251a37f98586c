"""Copies of corpora on the disks of nodes, which ranks read instead of the shared file system."""

import re
import shutil
from pathlib import Path

from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.formatting import human_size
from data_pipeline.foundation.locks import lock
from pretrain.config import RunConfig

_NOT_FOR_TRAINING = ("documents", ".stages")


def overrides(config: RunConfig, directory: Path) -> list[str]:
    """The overrides that make a run read the copies in `directory`. Remote corpora have a cache of their own."""
    return [f"{key}.corpus={_copy_of(directory, corpus)}" for key, corpus in _corpora(config)]


def stage(config: RunConfig, directory: Path) -> None:
    """Copies what is not in `directory` yet, except remote corpora. Raises FailedError if a file can't be copied.

    A file counts as copied if its size and time agree. Copies appear whole; one process of a node copies at a time.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("a") as file:
            lock(file, f"{directory}: jobs that copy to it at the same time may spoil each other's files", wait=True)
            for corpus in dict.fromkeys(corpus for _, corpus in _corpora(config)):
                _copy(Path(corpus), _copy_of(directory, corpus))
    except OSError as error:
        raise FailedError(f"stage: {error.filename or directory}: {error.strerror}") from None


def _copy(corpus: Path, copy: Path) -> None:
    copied = 0
    for source in sorted(path for path in corpus.rglob("*") if path.is_file()):
        name = source.relative_to(corpus)
        target = copy / name
        if name.parts[0] in _NOT_FOR_TRAINING or _same(source, target):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.copy2(source, temporary)
        temporary.replace(target)
        copied += source.stat().st_size
    print(f"{corpus} -> {copy}: {human_size(copied)} copied", flush=True)


def _same(source: Path, target: Path) -> bool:
    if not target.exists():
        return False
    there, here = source.stat(), target.stat()
    return (there.st_size, there.st_mtime_ns) == (here.st_size, here.st_mtime_ns)


def _corpora(config: RunConfig) -> list[tuple[str, str]]:
    """(key, corpus) for each corpus of a run that isn't remote."""
    found = [
        *((f"data.train.{number}", entry.corpus) for number, entry in enumerate(config.data.train)),
        *((f"data.validation.{number}", entry.corpus) for number, entry in enumerate(config.data.validation)),
    ]
    return [(key, corpus) for key, corpus in found if "://" not in corpus]


def _copy_of(directory: Path, corpus: str) -> Path:
    """The directory of a corpus's copy: different for corpora with the same last name."""
    return directory / re.sub(r"[^A-Za-z0-9._-]", "-", str(Path(corpus).absolute()).strip("/"))
