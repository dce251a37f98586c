"""`launch doctor`: checks machines before a run. Each check runs in a process with a time limit."""
