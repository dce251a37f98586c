"""Ladders: models of growing size, trained alike, from which the loss of the next size is predicted."""
