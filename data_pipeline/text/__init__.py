"""Types that cleaning, deduplication and objectives share: documents, sentences, words, tallies, vocabularies."""
