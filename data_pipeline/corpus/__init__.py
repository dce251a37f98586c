"""What a finished corpus is: its manifest, its blocks, and whether the files agree with them."""

from data_pipeline.corpus.corpus import FORMAT_VERSION, Blocks, Corpus, open_corpus

__all__ = ["FORMAT_VERSION", "Blocks", "Corpus", "open_corpus"]
