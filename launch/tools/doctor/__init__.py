"""`launch doctor`: checks machines before a run. Each check has its own process and time limit."""
