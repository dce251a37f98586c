"""`launch init`: what formats the user's text has, what this machine can train, and the files that follow from both."""
