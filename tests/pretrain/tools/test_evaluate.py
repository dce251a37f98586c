"""`pretrain evaluate`: which corpora a checkpoint is evaluated on, and how they are read."""

import re

import pytest

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.engine.checkpoint.trained import save_weights
from tests.support.small_evaluations import T5, evaluated, evaluation_of


def test_a_corpus_whose_ids_mean_something_else_is_refused(small_corpus, tmp_path):
    """The same text model, and as many ids: of a special token and one sentinel less."""
    tokenizer = open_corpus(small_corpus).tokenizer
    other = Tokenizer(tokenizer.model, ["[R]"], tokenizer.sentinels - 1)
    model, _ = evaluation_of(T5, other)
    save_weights(model.config, model.state_dict(), other, tmp_path / "saved")
    found = f"{small_corpus}: built with another tokenizer than the model's: tokenizer.sentinels is 19 there, 20 here; "
    with pytest.raises(UserError, match=re.escape(found)):
        evaluated(tmp_path / "saved", [small_corpus], ["validation_loss"])
