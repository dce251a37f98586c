"""`launch init`: finds the format of the user's text and what this machine can train, and writes the files for both."""
