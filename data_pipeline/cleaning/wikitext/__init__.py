"""Wikitext to the text that a reader sees."""
