"""A finished corpus: its manifest, its blocks, and checks that the files match them."""

from data_pipeline.corpus.corpus import FORMAT_VERSION, Blocks, Corpus, open_corpus

__all__ = ["FORMAT_VERSION", "Blocks", "Corpus", "open_corpus"]
