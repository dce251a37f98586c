"""A folder of runs that was moved or copied, with its sqlite file and artifacts: MLflow knows only their old places."""

import sqlite3
from contextlib import closing
from pathlib import Path

from pretrain.tracking.store import ARTIFACTS, sqlite_file

_PLACES = [
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
]
_SECONDS = 30.0  # that another process may keep the database locked


def uri_now(uri: str, run_dir: Path) -> str:
    """`uri`; if its sqlite file is gone, that of the nearest file of this name in a folder above `run_dir`."""
    file = sqlite_file(uri)
    if file is None or file.exists():
        return uri
    above = (parent / file.name for parent in run_dir.absolute().parents)
    return next((f"sqlite:///{found}" for found in above if found.is_file()), uri)


def follow(database: Path) -> None:
    """Makes the artifacts' places in `database` those beside it, if its artifacts are there.

    MLflow keeps them as absolute URIs, even where it is given relative ones.
    """
    folder = database.parent / ARTIFACTS
    if not folder.is_dir():
        return
    now = f"{folder.as_uri()}/"
    with closing(sqlite3.connect(database, timeout=_SECONDS)) as connection, connection:
        found = connection.execute("SELECT artifact_location FROM experiments").fetchall()
        for (location,) in found:
            before, beside, _ = (location or "").rpartition(f"/{ARTIFACTS}/")
            old = before + beside
            if beside and old != now and old.startswith("file://"):
                for table, column in _PLACES:
                    moved = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                    connection.execute(moved, (now, len(old) + 1, len(old), old))
