"""What is built on the packages, as an outsider would: experiments, and minimal pairs. Run from a checkout."""
