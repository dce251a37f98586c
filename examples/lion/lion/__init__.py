"""Lion: an optimizer whose updates are signs."""
