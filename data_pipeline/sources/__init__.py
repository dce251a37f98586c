"""Sources: the readers of all file formats, with the options of each."""
