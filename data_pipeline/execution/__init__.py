"""How a build runs: units of work on Ray, ownership of a corpus, and the parts and buckets that units exchange."""
