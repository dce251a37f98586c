"""Fixtures that several tests of exports share."""

from pathlib import Path

import pytest

from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.export import export, import_
from tests.support.small_exports import new_model, tokenizer_of


@pytest.fixture
def bart_tokenizer(spiece) -> Tokenizer:
    return tokenizer_of(spiece, 20, ["<s>", "<mask>"])


@pytest.fixture
def checkpoint(spiece, tmp_path) -> Path:
    """A checkpoint of a T5 of random weights."""
    model = new_model()
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "first")
    import_(tmp_path / "first", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"
