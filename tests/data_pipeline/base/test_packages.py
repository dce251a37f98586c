"""The version of the code, and what git says of a folder."""

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from data_pipeline.base import packages
from data_pipeline.base.packages import code_version


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=Ada", "-c", "user.email=ada@example.org", *arguments]
    alone = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=alone).stdout.strip()


def test_the_codes_version_is_the_commit_and_whether_the_tree_differs_from_it(tmp_path):
    assert code_version(tmp_path) == version("encdec-pretrain")  # no repository
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "--annotate", "v1", "--message", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert len(commit) == 40
    assert code_version(tmp_path) == commit
    (tmp_path / "code.py").write_text("2")
    assert code_version(tmp_path) == f"{commit}-dirty"


def test_the_output_of_git_may_have_bytes_that_are_no_utf_8(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_bytes("é é\n".encode("latin-1"))
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    (tmp_path / "code.py").write_bytes(b"\xff \xc3\xa9\n")
    difference = packages.git("diff", "HEAD", source=tmp_path)
    unknown = "\N{REPLACEMENT CHARACTER}"
    assert difference.splitlines()[-2:] == [f"-{unknown} {unknown}", f"+{unknown} é"]
