"""What is too long, too random or too dependent on a machine to gate a change: for a release, and after large changes.

    make gpu     how fast training is on the GPU of a machine, and whether it is right: 10 minutes for each of two calls
    make faults  faults × points of a run × one and two hosts, 200 cells of them, then 30 of builds: 2 to 3 hours
    make soak    the longest tests; training and builds that are killed at random moments, for an hour
    make fuzz    100,000 damaged files for the readers and the cleaner: half an hour

The times are of two CPU cores. `python -m checks.soak.ettr RUN.yaml --every 30 --minutes 60` measures the share of
useful time of a run that meets failures. Checks use helpers of `tests`; `tests/checks` runs short forms of them in CI.
"""
