"""Small models and tokenizers that tests export."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.models.model import Model
from tests.support.exported import randomise
from tests.support.small_models import as_at_the_start

PIECES = 300  # of the fixture `spiece`


def tokenizer_of(spiece: Path, sentinels: int = 100, special_tokens: Sequence[str] = ()) -> Tokenizer:
    return Tokenizer(SentencePiece.read(spiece), special_tokens, sentinels)


def new_model() -> Model:
    return as_at_the_start("t5", vocab_size=PIECES + 100)


def new_bart(tokenizer: Tokenizer) -> Any:
    vocabulary = tokenizer.vocabulary
    marks = {"vocab_size": tokenizer.size, "pad_id": vocabulary.pad, "eos_id": vocabulary.eos}
    return randomise(as_at_the_start("bart", **marks), std=0.3)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
