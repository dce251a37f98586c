"""Which corpus file builds a corpus that isn't there."""

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from data_pipeline.foundation import paths

_OUTPUT = re.compile(r"^output:.*$", re.MULTILINE)


def corpus_file_of(directory: str | Path, folders: Iterable[Path] = ()) -> str | None:
    """The corpus file whose `output` is `directory`, as commands take it; None if there is none.

    It is looked for in `folders`, in the current one, and among those that ship (`configs:corpora/NAME.yaml`).
    """
    beside = {str(path): path for folder in (*folders, Path()) for path in sorted(folder.glob("*.yaml"))}
    wanted = Path(directory).absolute()
    for name, path in {**beside, **paths.shipped("corpora/*.yaml")}.items():
        output = _output(path)
        if output is not None and Path(output).absolute() == wanted:
            return name
    return None


def how_to_build(directory: str | Path, folders: Iterable[Path] = ()) -> str:
    """The command that builds the corpus in `directory`."""
    return f"data-pipeline build {corpus_file_of(directory, folders) or 'CORPUS.yaml'}"


def _output(path: Path) -> str | None:
    """The key `output` at the top of a YAML file. Only that line is parsed: the file may be anything."""
    try:
        found = _OUTPUT.search(path.read_text(encoding="utf-8"))
        value = yaml.safe_load(found[0])["output"] if found else None
        return paths.local(value) if isinstance(value, str) else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
