"""The stages of a build, one file each: each plans its units and does their work."""
