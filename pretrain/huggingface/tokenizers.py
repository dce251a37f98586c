"""Tokenizers as transformers' `AutoTokenizer` loads them."""

from pathlib import Path

from data_pipeline.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.sentencepiece import MODEL, SentencePiece
from pretrain.huggingface.interchange import Interchange


def write(tokenizer: Tokenizer, interchange: Interchange, directory: Path) -> None:
    """Writes the tokenizer's files into `directory`, for a model of the family of `interchange`."""
    if not isinstance(tokenizer.model, SentencePiece) or interchange.model_type != "t5":
        raise UserError(f"a tokenizer of kind {tokenizer.model.kind} can't be exported yet, only sentencepiece")
    if tokenizer.special_tokens:
        raise UserError(
            f"special tokens can't be exported yet; the tokenizer has {', '.join(tokenizer.special_tokens)}"
        )
    (directory / MODEL).write_bytes(tokenizer.model.files[MODEL])
    from transformers import T5Tokenizer  # takes seconds to import

    # Beside spiece.model, tokenizer.json and tokenizer_config.json: transformers prefers and needs these.
    T5Tokenizer.from_pretrained(directory, extra_ids=tokenizer.sentinels).save_pretrained(directory)
