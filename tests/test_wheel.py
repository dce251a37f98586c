"""The wheel is whole: installed, it works outside the checkout, with the config files that ship."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("data_pipeline", "pretrain", "launch", "configs")
FILES = ("pyproject.toml", "README.md", "LICENSE")
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('dist')"  # what pip calls
LOAD = """
import data_pipeline
from data_pipeline.config import CorpusConfig
from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import load
from pretrain.config import RunConfig
run, corpus = load("run.yaml", [], RunConfig), load(paths.config("configs:corpora/quickstart.yaml"), [], CorpusConfig)
print(data_pipeline.__file__, run.model.d_model, run.run.name, corpus.sources[0].path)
"""
RUN = """
extends: configs:runs/t5-v1.1-base-wikipedia.yaml  # which extends others, the last of them in another folder
run: {name: mine}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder in which the wheel has been unpacked: `pip install --target` without what it depends on."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "target"))
    for file in FILES:  # setuptools builds beside the source; the checkout stays clean
        shutil.copy(ROOT / file, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("dist/encdec_pretrain-*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def run_installed(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "120"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_wheel_holds_what_ships(installed):
    def files(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if "__pycache__" not in path.parts}

    for package in ("data_pipeline", "pretrain", "launch"):
        assert files(installed / package) >= files(ROOT / package), package
    assert files(installed / "data_pipeline/configs") == files(ROOT / "configs")
    (commands,) = installed.glob("*.dist-info/entry_points.txt")
    assert {"data-pipeline", "pretrain", "launch"} <= {
        line.partition(" =")[0] for line in commands.read_text().split("\n")
    }
    assert not (installed / "tests").exists()


def test_an_installed_wheel_works_in_an_empty_folder(installed, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    package = installed / "data_pipeline"
    loaded = run_installed(installed, tmp_path, "-c", LOAD)
    found = [package / "__init__.py", 768, "mine", package / "samples/king-james.jsonl.bz2"]
    assert loaded.stdout.split() == list(map(str, found)), loaded.stderr
    shown = run_installed(installed, tmp_path, "-m", "data_pipeline", "--help")
    assert (shown.returncode, "Build the whole corpus" in shown.stdout) == (0, True), shown.stderr
