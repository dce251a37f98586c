"""How often a model prefers the acceptable sentence of two."""
