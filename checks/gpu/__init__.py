"""`make gpu`: what a machine with a GPU settles in a quarter of an hour, and what the same checks say on a CPU.

    python -m checks.gpu [--call 1|2|3] [--device cpu|cuda] [--out FILE] [--budget SECONDS] [--only NAME ...] [--list]

Each check is a process of its own with a time limit, and runs alone. What it finds is a line of JSON in FILE as soon as
it is found. A check that fails or hangs doesn't stop the others. `docs/how-to/check-a-gpu.md` says how to read the
lines.
"""
