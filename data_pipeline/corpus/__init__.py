"""A finished corpus: its manifest, its blocks, and checks that the files match them."""

from data_pipeline.corpus.corpus import CACHE_BYTES, Blocks, Corpus, Remote, open_corpus
from data_pipeline.corpus.manifest import FORMAT_VERSION

__all__ = ["CACHE_BYTES", "FORMAT_VERSION", "Blocks", "Corpus", "Remote", "open_corpus"]
