"""What is used beside a build: each a command of its own, which the path of a build doesn't need."""
