"""The tokenizer stage: one unit, which trains the tokenizer on the corpus or takes an existing one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.atomic import fingerprint
from data_pipeline.config import TokenizerConfig
from data_pipeline.errors import UserError
from data_pipeline.parts import Part
from data_pipeline.tokenizer import byte_level_bpe, sentencepiece
from data_pipeline.tokenizer.text_model import TextModel
from data_pipeline.tokenizer.tokenizer import FOLDER, Tokenizer, with_more_ids, write_files
from data_pipeline.tokenizer.training import train
from data_pipeline.vocabulary import Vocabulary
from data_pipeline.work_units import Stage, Unit

# Unit and files by kind: with another kind the unit is another one, and the files of the former go.
_UNITS = {
    "sentencepiece": ("spiece", (sentencepiece.MODEL, sentencepiece.LISTING)),
    "byte_level_bpe": ("byte-level-bpe", (byte_level_bpe.VOCABULARY, byte_level_bpe.MERGES)),
}
_NOT_OF_THE_MODEL = {"sentinels", "special_tokens", "dictionary"}


def plan(config: TokenizerConfig, seed: int, parts: Sequence[Part], documents: int) -> list[Unit]:
    """One unit. `documents`: how many of those in `parts` are for training."""
    if config.path is not None:
        tokenizer = Tokenizer(_existing(config), config.special_tokens, config.sentinels)
        if "vocab_size" in config.model_fields_set and config.vocab_size != tokenizer.pieces:
            raise UserError(
                f"tokenizer.vocab_size: {config.path} has {tokenizer.pieces} pieces, not {config.vocab_size}"
            )
        inputs: list[Any] = [tokenizer.sha256]
    else:
        inputs = [config.model_dump(exclude=_NOT_OF_THE_MODEL), seed, [part.checksums for part in parts]]
    share = min(1.0, config.sample_documents / max(1, documents))
    spec = {"config": config.model_dump(), "seed": seed, "parts": [part.path for part in parts], "share": share}
    name, files = _UNITS[config.kind]
    return [Unit(name, spec, fingerprint(inputs), tuple(f"{FOLDER}/{file}" for file in files))]


def make_tokenizer(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Writes the tokenizer's files; returns how many ids it has of its own."""
    config = TokenizerConfig.model_validate(spec["config"])
    if config.path is not None:
        model = _existing(config)
    else:
        model = train(config, corpus, spec["parts"], spec["seed"], spec["share"])
    Tokenizer(model, config.special_tokens, config.sentinels)  # refuses special tokens that were trained as pieces
    write_files(model, corpus)
    return {"pieces": model.size}


def expected(config: TokenizerConfig) -> Vocabulary:
    """What the ids will be for, before anything is trained."""
    own = sentencepiece.to_be_trained(config.vocab_size) if config.path is None else _existing(config).vocabulary
    return with_more_ids(own, config.special_tokens, config.sentinels)


STAGE = Stage("tokenizer", 3, make_tokenizer)


def _existing(config: TokenizerConfig) -> TextModel:
    assert config.path is not None
    if config.kind == "sentencepiece":
        return sentencepiece.SentencePiece.read(Path(config.path))
    dictionary = Path(config.dictionary) if config.dictionary is not None else None
    return byte_level_bpe.ByteLevelBPE.read(Path(config.path), dictionary)
