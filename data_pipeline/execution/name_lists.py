"""Lists of file names that many units need. Each list is a file in the corpus, so that no unit's spec repeats it."""

from collections.abc import Sequence
from pathlib import Path

from data_pipeline.foundation.atomic import fingerprint, write_json
from data_pipeline.foundation.json_file import read_json, read_valid_json


def write_names(corpus: Path, names: Sequence[str]) -> str:
    """Writes `names` to a file named by their hash, unless it has them already; returns its path within `corpus`."""
    path = f".stages/plans/{fingerprint(list(names))}.json"
    if read_valid_json(corpus / path, list[str]) != list(names):
        write_json(corpus / path, list(names))
    return path


def read_names(corpus: Path, path: str) -> list[str]:
    return read_json(corpus / path, list[str])
