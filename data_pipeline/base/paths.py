"""Validates paths and URLs of config files and arguments, and explains why one can't be opened."""

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path

import data_pipeline
from data_pipeline.base.errors import UserError, one_line
from data_pipeline.base.formatting import MASK

_SHIPPED = "configs:"
_CONFIGS = Path(data_pipeline.__file__).with_name("configs")  # in a checkout, a link to the folder at the top


def location(text: str) -> str:
    """A path on this machine or an fsspec URL. A leading `~` or `~user` becomes the home directory.

    Raises ValueError for an empty path and for a user who has no home directory.
    """
    if not text:
        raise ValueError("expected a path, got ''")
    expanded = os.path.expanduser(text)  # noqa: PTH111 (Path would drop a URL's second slash)
    if expanded.startswith("~"):
        raise ValueError(f"{text}: no home directory is known for that user (for a file of that name write ./{text})")
    return expanded


def local(text: str) -> str:
    """A path on this machine, expanded like a `location`. Raises ValueError for a URL."""
    if "://" in text:
        raise ValueError(f"{text} is a URL; expected a path on this machine or on a file system mounted here")
    return location(text)


def config(text: str) -> str:
    """A config file or a folder of them: a `local` path, or `configs:NAME` for one that ships with the package.

    Raises ValueError for a URL and for an unknown NAME, with the nearest names.
    """
    if not text.startswith(_SHIPPED):
        return local(text)
    names = shipped("*")
    if text not in names:
        nearest = difflib.get_close_matches(text, names, n=3, cutoff=0)
        raise ValueError(f"{text}: no such file ships with the package; the nearest are {', '.join(nearest)}")
    return str(names[text])


def shipped(pattern: str) -> dict[str, Path]:
    """The shipped config files that match `pattern`: paths by name, `configs:NAME`."""
    return {_SHIPPED + path.relative_to(_CONFIGS).as_posix(): path for path in sorted(_CONFIGS.rglob(pattern))}


def mlflow_uri(text: str) -> str:
    """MLflow's tracking URI: a `location`, or sqlite:///FILE with a local FILE.

    Raises ValueError like `location` and `local`, and for a URI whose password was masked.
    """
    prefix = "sqlite:///"
    if f":{MASK}@" in text:
        raise ValueError(f"{text}: the password isn't recorded; write it here again, or set MLFLOW_TRACKING_PASSWORD")
    return prefix + local(text.removeprefix(prefix)) if text.startswith(prefix) else location(text)


@contextlib.contextmanager
def opening(path: str) -> Iterator[None]:
    """Turns file systems' errors into a UserError in one line, which begins with `path`."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # each library raises its own errors: unknown protocol, no login, no network
        raise UserError(f"{path}: can't be read: {getattr(error, 'strerror', None) or one_line(error)}") from None
