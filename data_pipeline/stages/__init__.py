"""The stages of a build, one file each: what its units are made from, and the work that makes them."""
