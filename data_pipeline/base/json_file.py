"""Reads JSON files and validates them against types, so that a damaged or foreign file is refused at once."""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, TypeAdapter, ValidationError

from data_pipeline.base.atomic import SEAL
from data_pipeline.base.errors import FailedError, MissingPackage
from data_pipeline.base.packages import missing_under

logger = logging.getLogger(__name__)
T = TypeVar("T")
_COMPLETE = ("json_invalid", "missing", "value_error")  # problems whose messages don't need the value


def _is_below(path: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} leads out of the directory")
    return path


PathBelow = Annotated[str, AfterValidator(_is_below)]
"""A relative path in a file, which must not lead out of the file's directory."""


def read_json(path: Path, kind: type[T]) -> T:
    """The content of `path` as a `kind`: a dataclass, or any type with annotations that pydantic knows.

    Values keep their types ("5" is not a number), and keys that `kind` lacks are ignored. Raises FileNotFoundError if
    the file doesn't exist, FailedError, which names the file, the key and the value found, for wrong content, and
    MissingPackage if the file names something of a package that isn't installed.
    """
    return read_content(path.read_bytes, kind, path)


def read_content(read: Callable[[], bytes], kind: type[T], path: Path | str) -> T:
    """Like `read_json`; `read` returns the content of `path`."""
    try:
        content = read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FailedError(f"{path}: can't be read: {error.strerror}") from None
    return parse_json(content, kind, path)


def read_valid_json(path: Path, kind: type[T]) -> T | None:
    """Like `read_json` for a dispensable file: None if it is missing or damaged. Damage is logged."""
    return read_valid(lambda: read_json(path, kind))


def read_valid(read: Callable[[], T]) -> T | None:
    """The result of `read`; None if the file is missing or damaged. Damage is logged."""
    try:
        return read()
    except FileNotFoundError:
        return None
    except FailedError as error:
        logger.warning("%s; continuing without it", error)
        return None


def parse_json(content: bytes | str, kind: type[T], path: Path | str) -> T:
    """Like `read_json`, for the `content` of `path`."""
    try:
        return adapter(cast(Any, kind)).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "union_tag_invalid" and (lacking := missing_under(first["loc"], first["ctx"]["tag"])):
            raise MissingPackage(f"{path}: {key}: {lacking}") from None
        message = first["msg"].removeprefix("Value error, ")
        found = f", got {first['input']!r:.60}" if first["type"] not in _COMPLETE else ""
        raise FailedError(f"{path}: damaged: {f'{key}: ' if key else ''}{message}{found}") from None


def seal_holds(content: bytes) -> bool:
    """Whether the content of a JSON file is unchanged since `write_json` sealed it."""
    above, _, checksum = content.rpartition(SEAL)
    return checksum == hashlib.sha256(above).hexdigest().encode() + b'"\n}\n'


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Pydantic's converter between `kind` and JSON."""
    return TypeAdapter(kind)
