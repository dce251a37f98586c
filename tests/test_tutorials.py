"""Tutorials, as they stand on their pages, from an empty folder."""

import csv
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import data_pipeline
from tests.data_pipeline.engine.test_cluster import OF_A_NODE, OF_RAY, processes, start_node
from tests.support.object_store import ObjectStore, serving
from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]
SAMPLES = Path(data_pipeline.__file__).with_name("samples")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def commands_of(page: str, section: str = "") -> str:
    """The indented lines of a page, or of the end that begins with the heading `section`: a script for a shell."""
    text = (ROOT / f"docs/tutorials/{page}.md").read_text(encoding="utf-8")
    text = text[text.index(f"## {section}") :] if section else text
    return "\n".join(line.removeprefix("    ") for line in text.splitlines() if re.match(r" {4}|$", line))


def run_in(folder: Path, script: str) -> str:
    """What a script prints."""
    environment = {**os.environ, **OF_RAY, "PATH": PATH, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.slow
def test_two_objectives_are_compared_on_own_text(tmp_path):
    """With runs of three steps and one seed. Each row ends with a loss on the tasks of both objectives."""
    (tmp_path / "text").mkdir()
    pages = gzip.decompress(next(SAMPLES.glob("c4-train*.json.gz")).read_bytes()).splitlines()[:150]
    for number, line in enumerate(pages):
        (tmp_path / f"text/{number:03}.txt").write_text(json.loads(line)["text"])
    script = commands_of("compare-objectives").replace("--seeds 2", "--seeds 1 --budget 3steps")
    run_in(tmp_path, script)
    table = (tmp_path / "runs/compare-3steps/table.txt").read_text()
    parts = re.findall(r"^spans\* .*\d\.\d.*\nprefix .*\d\.\d", table, re.MULTILINE)
    assert len(parts) == 2, table
    with (tmp_path / "runs/compare-3steps/runs.csv").open() as file:
        losses = {
            run["row"]: [float(run[f"validation/{task}/loss"]) for task in ("blanks", "rest")]
            for run in csv.DictReader(file)
        }
    assert all(2.0 < loss < 20.0 for row in ("spans", "prefix") for loss in losses[row]), losses


@pytest.fixture
def store(monkeypatch) -> Iterator[ObjectStore]:
    yield from serving(monkeypatch)


@pytest.mark.slow
def test_a_corpus_is_built_in_a_bucket_by_a_ray_cluster_and_trained_from_there(store, tmp_path):
    """With an S3 server for the cloud, two Ray nodes for its machines, and the first steps of the run."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    script = commands_of("a-cluster", "In a cloud").replace("10.0.0.1", "127.0.0.1").replace("6379", str(free_port()))
    keys, *lines = script.replace("…", "of-a-test").strip().splitlines()
    nodes = [line for line in lines if line.startswith("ray start")]
    assert [line.split()[2] for line in nodes] == ["--head", "--address"]
    variables = {**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)}
    # sockets are below Ray's directory, and their paths may have at most 107 characters
    with tempfile.TemporaryDirectory(prefix="ray-") as own, processes() as started:
        for line, more in zip(nodes, (f"--include-dashboard=false --temp-dir={own}", ""), strict=True):
            command = f"{keys}\nexec {line} {more} {' '.join(OF_A_NODE)}"
            start_node(started, ["bash", "-euc", command], variables, tmp_path / "ray.log")
        stops = " --stop-at-step 2 || test $? -eq 75"
        others = [line + stops * line.startswith("launch") for line in lines if line not in nodes]
        told = run_in(tmp_path, "\n".join([keys, *others]))
    assert "s3://my-corpora/quickstart is complete" in told
    assert "agree with the manifest" in told
    timing = json.loads(store.filesystem().cat("my-corpora/quickstart/.stages/timings/tokens.json"))
    assert timing["workers"] == 2
    status = json.loads((tmp_path / "runs/bucket/status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 2)
