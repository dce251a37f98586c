"""The version of the code that made a corpus."""

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from data_pipeline.foundation.code_version import code_version


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=Ada", "-c", "user.email=ada@example.org", *arguments]
    alone = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=alone).stdout.strip()


def test_it_is_the_commit_and_whether_the_tree_differs_from_it(tmp_path):
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
