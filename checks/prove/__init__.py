"""Twelve claims of this project, each tried on this machine beside a definition that doesn't use its code.
`make prove`."""
