"""How a build runs: units of work on Ray, their records, and the merging of files that units exchange."""
