"""Are the tables of docs/results what their data say? `make results`."""
