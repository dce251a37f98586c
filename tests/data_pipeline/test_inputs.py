"""The files that a source's path names: none is silently skipped."""

import os
from pathlib import Path

import pytest

from data_pipeline.config import SourceConfig
from data_pipeline.execution.inputs import list_files
from data_pipeline.foundation.errors import UserError


def names(path: Path | str) -> list[str]:
    return [file.name for file in list_files(SourceConfig(format="text", path=str(path)))]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a, sub/b, and link, which leads to a directory elsewhere with c and deep/e."""
    for file in ("in/a", "in/sub/b", "elsewhere/c", "elsewhere/deep/e"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    (tmp_path / "in/link").symlink_to("../elsewhere")
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("below", "expected"),
    [
        ("", ["a", "link/c", "link/deep/e", "sub/b"]),
        ("/*", ["a", "link/c", "link/deep/e", "sub/b"]),
        ("/**", ["a", "link/c", "link/deep/e", "sub/b"]),
        ("/*/[bc]", ["link/c", "sub/b"]),
        ("/**/e", ["link/deep/e"]),
        ("/link", ["c", "deep/e"]),
        ("/sub/b", ["b"]),
    ],
)
def test_a_directory_stands_for_all_files_below_it_and_so_does_a_link_to_one(folder, below, expected):
    assert names(f"{folder}{below}") == expected


@pytest.mark.parametrize("below", ["", "/*", "/**/a"])
def test_a_link_to_a_directory_above_it_is_named(folder, below):
    (folder / "sub/loop").symlink_to(folder)
    with pytest.raises(UserError, match=r"sub/loop.*: links to a directory above itself"):
        names(f"{folder}{below}")


@pytest.mark.parametrize("below", ["", "/*"])
def test_what_is_no_file_is_named(folder, below):
    (folder / "gone").symlink_to("nowhere")
    with pytest.raises(UserError, match="in/gone: links to nowhere, which doesn't exist"):
        names(f"{folder}{below}")
    (folder / "gone").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match="in/pipe: expected a file or a directory"):
        names(f"{folder}{below}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every directory")
def test_a_directory_that_may_not_be_listed_is_named(folder):
    (folder / "sub").chmod(0)
    try:
        with pytest.raises(UserError, match="in/sub: no permission to list this directory"):
            names(folder)
    finally:
        (folder / "sub").chmod(0o700)


def test_a_name_that_is_not_utf8_is_named_with_escapes(folder):
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9")).write_text("")
    with pytest.raises(UserError, match=r"in/caf\\xe9: the name isn't UTF-8"):
        names(folder)


def test_a_remote_directory_stands_for_all_files_below_it():
    import fsspec

    for file in ("a", "sub/b"):
        with fsspec.open(f"memory://listed/{file}", "wb") as out:
            out.write(b"text")
    for path in ("memory://listed", "memory://listed/*"):
        assert names(path) == ["a", "sub/b"]
