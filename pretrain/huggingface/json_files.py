"""JSON files of a Hugging Face directory."""

import json
from pathlib import Path
from typing import Any

from data_pipeline.foundation.errors import FailedError, UserError

Json = dict[str, Any]


def read(path: Path) -> Json:
    """The object in the file. Raises UserError if there is no file, FailedError if it holds no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None
    except (ValueError, RecursionError):
        raise FailedError(f"{path}: damaged: not valid JSON") from None
    if not isinstance(content, dict):
        raise FailedError(f"{path}: damaged: not a JSON object")
    return content


def read_if_there(path: Path) -> Json:
    """Like `read`, but returns an empty object if there is no file."""
    return read(path) if path.exists() else {}


def write(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
