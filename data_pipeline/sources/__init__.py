"""Sources: readers, one file for each file format, with the options of the format."""
