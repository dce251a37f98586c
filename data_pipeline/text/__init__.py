"""Types that cleaning, deduplication and objectives share: documents, sentences, tallies, vocabularies."""
