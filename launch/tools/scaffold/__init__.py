"""The first files for one's own text: what the folder holds, what the machine can train, the files themselves."""
