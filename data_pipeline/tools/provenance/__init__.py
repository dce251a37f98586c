"""Which rule kept, changed or dropped each document of a finished corpus."""
