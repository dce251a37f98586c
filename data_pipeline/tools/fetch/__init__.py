"""Downloads of published files."""
