"""What became of each document of a finished corpus, and by which rule."""
