"""Every row of configs/experiments/autoregressive-options, and the task without language, takes two steps."""

import json
import math
from pathlib import Path

import pytest

from tests.conftest import build, made_once, write_corpus_file
from tests.pretrain.runs import losses, train_each
from tests.slow import slow

ROOT = Path(__file__).parents[2]
ROWS = {path.stem: path for path in sorted((ROOT / "configs/experiments/autoregressive-options").glob("*.yaml"))}
del ROWS["experiment"]
ROWS["integer-sequences"] = ROOT / "configs/runs/integer-sequences.yaml"
FIRST = ("integer-sequences", "matrix", "rotary-subtracted")
OTHERS = tuple(row for row in ROWS if row not in FIRST)


@pytest.fixture(scope="module")
def corpora(small_corpus):
    """A folder with a corpus of words and one of integers."""

    def make(folder):
        tokenizer = {"path": str(small_corpus / "tokenizer/spiece.model"), "sentinels": 0}
        sources = [{"format": "c4", "path": str(small_corpus.parent / "*.json.gz"), "language": "en"}]
        rows = {"objective": {"name": "causal_lm", "length": 32}}
        words = {"output": str(folder / "words"), "tokenizer": tokenizer, "sources": sources, "rows": rows}
        build(write_corpus_file(folder / "words.yaml", **words))
        integers = {"extends": str(ROOT / "configs/corpora/integer-sequences.yaml"), "output": str(folder / "integers")}
        (folder / "integers.yaml").write_text(json.dumps(integers))
        build(folder / "integers.yaml")

    return made_once("autoregressive_options", make)


@pytest.mark.parametrize("rows", [FIRST, *slow((OTHERS,))], ids=["first", "others"])
def test_every_row_takes_two_steps(rows, corpora, tmp_path, subtests):
    for row in rows:
        corpus = corpora / ("integers" if row == "integer-sequences" else "words")
        changes = {
            "extends": str(ROWS[row]),
            "run": {"name": row, "directory": str(tmp_path / row / "run"), "max_steps": 2},
            "data": {name: [{"corpus": str(corpus)}] for name in ("train", "validation")},
            "schedule": {"warmup_steps": 0},
            "checkpoint": {"every_steps": 2},
            "evaluation": [],
            "tracking": {"mlflow": None, "log_every_steps": 1},
        }
        (tmp_path / row).mkdir()
        (tmp_path / row / "run.yaml").write_text(json.dumps(changes))
    assert train_each(1, [(tmp_path / row / "run.yaml", None) for row in rows]) == [[0] * len(rows)]
    for row in rows:
        with subtests.test(row):
            found = losses(tmp_path / row / "run.yaml")
            assert found.keys() == {1, 2}
            assert found[1] == pytest.approx(math.log(24 if row == "integer-sequences" else 500), abs=0.5)
            assert math.isfinite(found[2])
