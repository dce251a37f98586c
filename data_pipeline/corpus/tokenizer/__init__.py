"""Text to ids and back: sentencepiece as in T5, byte-level BPE as in GPT-2 and BART, WordPiece as in BERT, and BPE in a
tokenizer.json, such as Llama's, Qwen's and Gemma's."""

from data_pipeline.corpus.tokenizer.tokenizer import Tokenizer, TokenizerDescription, in_corpus, load, read, save

__all__ = ["Tokenizer", "TokenizerDescription", "in_corpus", "load", "read", "save"]
