"""`launch doctor`: checks machines before a run, each check in a process and a time limit of its own."""
