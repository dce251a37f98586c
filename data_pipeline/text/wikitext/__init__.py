"""Converts wikitext to the text that a reader sees."""
