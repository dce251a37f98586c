"""Built on the packages as an outsider would: experiments, minimal pairs, an import. Run them from a checkout."""
