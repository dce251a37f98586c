"""Which models write masked spans that a recipe can compare."""

import pytest

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from examples.recipes.masked_spans import Masked, fillings
from pretrain.config import RunConfig
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.run.world import World
from pretrain.tools.evaluate import Session
from tests.conftest import TOP
from tests.support.small_evaluations import SIZES, evaluation_of

BART = {"family": "bart", **SIZES, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_positions": 64}


def test_a_model_that_copies_its_input_is_refused(spiece):
    """A BART writes the whole text: what it writes for a span would count as an empty span."""
    tokenizer = Tokenizer(SentencePiece.read(spiece), ("<s>", "<mask>"), 20)
    model, _ = evaluation_of(BART, tokenizer)
    config = load(TOP / "configs/runs/bart-10m-enwik8.yaml", ["data.objective={name: denoising}"], RunConfig)
    session = Session(TrainedModel(model, tokenizer, "denoising"), config, World.on_this_node(), 4)
    with pytest.raises(UserError, match="writes masked spans after sentinels, as T5; prompts have the form copy"):
        fillings(session, [Masked("The sky", " is", " blue")], 4)
