"""Text to ids and back: sentencepiece as in T5, bytes as in ByT5, symbols that a regular expression finds, byte-level
BPE as in GPT-2, and any BPE, WordPiece or WordLevel in a tokenizer.json."""

from data_pipeline.corpus.tokenizer.tokenizer import (
    Tokenizer,
    TokenizerDescription,
    as_section,
    in_corpus,
    load,
    meaning_of_ids,
    read,
    save,
)

__all__ = ["Tokenizer", "TokenizerDescription", "as_section", "in_corpus", "load", "meaning_of_ids", "read", "save"]
