"""`launch init`: detects the format of the user's text and what this machine can train, and writes a run's files."""
