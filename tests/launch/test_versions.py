"""Commands where another DeepSpeed is installed than those that the tests run under."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import run_file
from tests.support.slow import slow

OTHER = "0.20.0"


def installed(folder: Path) -> None:
    """Puts DeepSpeed into `folder`, as it is but for the file with its version."""
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    (own,) = found.submodule_search_locations or []
    (folder / "deepspeed").mkdir(parents=True)
    for path in Path(own).iterdir():
        if path.name == "git_version_info_installed.py":
            (folder / "deepspeed" / path.name).write_text(f"{path.read_text()}\nversion = {OTHER!r}\n")
        elif path.name != "__pycache__":
            (folder / "deepspeed" / path.name).symlink_to(path)


@pytest.mark.parametrize("command", ["launch local --ranks 2", *slow("pretrain train")])
def test_another_deepspeed_is_refused_in_one_line(command, small_corpus, tmp_path):
    installed(tmp_path / "others")
    module, *options = command.split()
    path = run_file(tmp_path, small_corpus)
    done = subprocess.run(
        [sys.executable, "-m", module, options[0], path, *options[1:]],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/others:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = f"deepspeed {OTHER} is installed; supported: 0.19.8; install it with: pip install deepspeed==0.19.8"
    assert (done.returncode, done.stderr + done.stdout) == (
        2,
        f"error: {said}\n",
    )  # of the first rank's log, or its own
    assert not (tmp_path / "run/checkpoints").exists()
