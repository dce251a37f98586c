"""Recipes for tokens that aren't words: each module makes the data of a field and measures what a model has learnt."""
