"""A finished corpus: its manifest, its blocks, and checks that the files match them."""

from data_pipeline.corpus.blocks import Blocks
from data_pipeline.corpus.corpus import CACHE_BYTES, FORMAT_VERSION, Corpus, Remote, open_corpus

__all__ = ["CACHE_BYTES", "FORMAT_VERSION", "Blocks", "Corpus", "Remote", "open_corpus"]
