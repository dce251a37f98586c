"""How a build is run: units of work on Ray, who owns a corpus, the parts and buckets that units hand on."""
