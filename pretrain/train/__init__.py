"""One run: what it needs, checked before it starts, its steps, and what they report."""
