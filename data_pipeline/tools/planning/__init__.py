"""What a build needs before it starts: units, time, memory, disk and files opened."""
