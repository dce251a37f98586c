"""Tutorials, as they stand on their pages, from an empty folder."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import data_pipeline

ROOT = Path(__file__).parents[1]
SAMPLES = Path(data_pipeline.__file__).with_name("samples")


def commands_of(page: str) -> str:
    """The indented lines of a page: a script for a shell."""
    text = (ROOT / f"docs/tutorials/{page}.md").read_text(encoding="utf-8")
    return "\n".join(line.removeprefix("    ") for line in text.splitlines() if re.match(r" {4}|$", line))


@pytest.mark.slow
def test_two_objectives_are_compared_on_own_text(tmp_path):
    """With runs of three steps and one seed. Both rows end with a loss on the same task."""
    (tmp_path / "text").mkdir()
    pages = gzip.decompress(next(SAMPLES.glob("c4-train*.json.gz")).read_bytes()).splitlines()[:150]
    for number, line in enumerate(pages):
        (tmp_path / f"text/{number:03}.txt").write_text(json.loads(line)["text"])
    script = commands_of("compare-objectives").replace("--seeds 2", "--seeds 1 --budget 3steps")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    table = (tmp_path / "runs/compare-3steps/table.txt").read_text()
    assert re.search(r"^spans\*? .*\d\.\d", table, re.MULTILINE), table
    assert re.search(r"^prefix .*\d\.\d", table, re.MULTILINE), table
