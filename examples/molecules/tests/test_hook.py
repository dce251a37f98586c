"""The hook without the wheels: how many molecules are written within a budget."""

from dataclasses import replace

import pytest
import torch
from molecules.hook import Moses
from molecules.settings import MosesSettings

from data_pipeline.base.config_file import check
from data_pipeline.corpus import open_corpus
from pretrain.evaluate.hook import Collectives
from tests.support.builds import built, write_corpus_file
from tests.support.small_evaluations import T5, evaluation_of
from tests.support.tables import each


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("molecules")
    (folder / "train.txt").write_text("".join(f"{'C' * number}O\n" for number in range(1, 400)))
    source = {"format": "text", "path": str(folder / "train.txt"), "options": {"sample_by": "line"}}
    changes = {"sources": [source], "tokenizer": {"kind": "symbols", "sentinels": 16}, "cleaning": {"profile": "none"}}
    corpus = open_corpus(built(write_corpus_file(folder / "molecules.yaml", output=str(folder / "out"), **changes)))
    return evaluation_of(T5, corpus.tokenizer, {})[1]


@each("budget, written", [(None, 1100), (1e-9, 512)])
def test_a_spent_budget_ends_the_samples_after_a_share(evaluation, budget, written, monkeypatch):
    monkeypatch.setattr("molecules.hook.measured", lambda smiles, everything: {"valid": len(smiles) / 1100})
    settings = check({"samples": 1100, "max_new_tokens": 3}, MosesSettings, "hook")
    collectives = Collectives(budget, torch.device("cpu"), alone=True)
    result = Moses(settings).evaluate(replace(evaluation, collectives=collectives))
    assert result.metrics == {"moses/valid": written / 1100}
    assert result.lines[0].startswith(f"{written:,} molecules")
