"""Each recipe from its data to its table, with its own corpus and run file, in three steps of a small model."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from data_pipeline.base.config_file import load
from examples.recipes import code, items, m3, proteins, time_series
from pretrain.config import RunConfig
from tests.examples.recipes.test_proteins import profile_of
from tests.support.forked import run_forked
from tests.support.in_process import done_here
from tests.support.tables import each

pytestmark = pytest.mark.slow

SOURCE = '''"""A module."""

import os


def size(path):
    total = os.stat(path).st_size
    return total + 1


'''


def trained(name: str, folder: Path, *corpus: str) -> Path:
    """The directory of a run of configs/runs/NAME.yaml, on a corpus that is built from data/ in `folder`."""
    run = load(f"configs/runs/{name}.yaml", [], RunConfig)
    built, directory = folder / "corpus", folder / "run"
    done_here(
        "data-pipeline",
        "build",
        f"configs/corpora/{Path(run.data.train[0].corpus).name}.yaml",
        f"output={built}",
        *corpus,
    )
    entries = f"[{{corpus: {built}}}]"
    small = [
        f"run.directory={directory}",
        "run.max_steps=3",
        "schedule={name: constant, warmup_steps: 1}",
        "evaluation=[]",
        "tracking.mlflow=null",
    ]
    small += [f"data.train={entries}", f"data.validation={entries}"]
    small += ["data.curriculum.0.until_step=1"] if run.data.curriculum else []
    done = run_forked("train", f"configs/runs/{name}.yaml", *small)
    assert done.returncode == 0, done.stderr
    return directory


def sources(*paths: Path) -> list[str]:
    return [f"sources.{number}.path={path}" for number, path in enumerate(paths)]


def table(app, *arguments: str | Path) -> list[dict[str, str]]:
    """The table that a command prints."""
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0
    return [*csv.DictReader(done.stdout.splitlines())]


@each("kind", ["bpe", "bytes"])
def test_code(tmp_path, kind):
    library, data = tmp_path / "library", tmp_path / "data"
    library.mkdir()
    for number in range(60):
        (library / f"module{number}.py").write_text(SOURCE.replace("size", f"size_{number}") * 3)
    CliRunner().invoke(code.app, ["data", str(data), "--library", str(library)], catch_exceptions=False)
    assert {path.name for path in (data / "held-out").iterdir()} | {
        path.name for path in (data / "train").iterdir()
    } == {path.name for path in library.iterdir()}
    paths = [f"sources.{number}.path={data}/{split}" for number, split in enumerate(("train", "held-out"))]
    run = trained(f"code-{kind}", tmp_path, *paths, *(["tokenizer.vocab_size=300"] if kind == "bpe" else []))
    rows = table(code.app, "measure", run, data, "--number", 6)
    assert [row["filled by"] for row in rows[:4]] == [
        "model",
        "model, with another span's input",
        "the most frequent in training",
        "the most frequent around it",
    ]
    assert all(float(row["bits per byte"]) > 1 for row in rows if row["filled by"] == "model")


@each("of", ["prott5", "ankh"])
def test_proteins(tmp_path, of):
    families = [profile_of(consensus * 4) for consensus in ("MKTAYIAKQR", "GDSGGPLVCN")]
    proteins.write_data(tmp_path / "data", families[:1], families[1:], sequences=60, seed=0)
    paths = [
        f"sources.{number}.path={tmp_path}/data/{split}.fasta" for number, split in enumerate(("train", "held-out"))
    ]
    run = trained(f"proteins-{of}", tmp_path, *paths, "dedup.documents=false")
    rows = table(proteins.app, "measure", run, tmp_path / "data", "--number", 20)
    by = {(row["families"], row["filled by"]): row["right, %"] for row in rows}
    assert by["trained", "the family's profile"] == by["others", "the family's profile"] == "100.0 ± 0.0"
    assert by["trained", "both neighbours"] == "100.0 ± 0.0"  # the sequence is the same each time
    assert float(by["others", "background frequencies"].split()[0]) < 50
    assert all(float(row["perplexity"]) > 1 for row in rows if row["filled by"].startswith("model"))


def test_time_series(tmp_path):
    data = tmp_path / "series"
    arguments = ["data", str(data), "--number", "160", "--tested", "4"]
    CliRunner().invoke(time_series.app, arguments, catch_exceptions=False)
    run = trained("time-series", tmp_path, *sources(data / "train.txt", data / "held-out.txt"))
    rows = {row["forecast"]: row for row in table(time_series.app, "measure", run, data, "--number", 4)}
    assert float(rows["the process's mean"]["all (4)"]) < float(rows["Naive"]["all (4)"])
    assert float(rows["the process's mean"]["all (4)"]) < float(rows["model"]["all (4)"])


def test_m3(tmp_path):
    for split, purpose in (("train", 0), ("held-out", 1)):
        (tmp_path / f"{split}.tsv").write_text("".join(m3.synthetic(64, 0, purpose)))
    past, future = np.array([1.0, 3, 2, 6] * 5 + [1.5]), np.array([3.0, 2, 6])
    series = [
        {"kind": "quarterly", "period": 4, "past": (unit * past).tolist(), "future": (unit * future).tolist()}
        for unit in (1, 1024)
    ]
    (tmp_path / "m3.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in series))
    run = trained("m3", tmp_path, *sources(tmp_path / "train.tsv", tmp_path / "held-out.tsv"))
    rows = {row["forecast"]: row for row in table(m3.app, "measure", run, tmp_path)}
    assert float(rows["seasonal Naive"]["quarterly (2)"]) == 0
    # 1.5 again and again, in units of the only difference between two years, 0.5 in one of 17 points
    assert float(rows["Naive"]["all (2)"]) == pytest.approx((1.5 + 0.5 + 4.5) / 3 / (0.5 / 17), abs=0.001)
    assert float(rows["model"]["all (2)"]) > 0
    assert rows["model, with another series"]["all (2)"] == rows["model"]["all (2)"]  # the other one has the same bins


def test_items(tmp_path):
    histories, codes, data = tmp_path / "inter.json", tmp_path / "index.json", tmp_path / "items"
    random = np.random.default_rng(0)
    histories.write_text(json.dumps({str(user): random.integers(8, size=6).tolist() for user in range(40)}))
    codes.write_text(json.dumps({str(item): [item // 4, item % 4] for item in range(8)}))
    CliRunner().invoke(items.app, ["data", str(histories), str(codes), str(data)], catch_exceptions=False)
    run = trained("items", tmp_path, *sources(data / "train.tsv", data / "validation.tsv"))
    hook = f"{{hook: retrieval, file: {data}/test.tsv, allowed: {data}/items.txt, at: [1, 4], num_beams: 4}}"
    done = run_forked("evaluate", run, "--hook", hook, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # an untrained model finds the same half of the items for nearly all: right for about half of the users
    assert 0.2 < found["retrieval/test/recall_at_4"] < 0.8
    assert found["retrieval/test/recall_at_1"] < found["retrieval/test/recall_at_4"]
