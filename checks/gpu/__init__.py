"""`make gpu`: what a machine with a GPU settles in ten minutes, and what the same checks say on a CPU.

    python -m checks.gpu [--device cpu|cuda] [--budget SECONDS] [--out FILE] [--only NAME ...] [--list]

Each check is a process of its own with a time limit. Its result is one line of JSON, printed as soon as the check ends.
A check that fails or hangs doesn't stop the others. `docs/how-to/check-a-gpu.md` says how to read the lines.
"""
