"""The checks by call, in order, with the seconds that they may take on an H100.

The first two calls fill a quarter of an hour on a machine that is lent for it, with its start: speed first, alone on
the machine, then small runs at once; then a run, which has compiled kernels from the first call. The third has no such
limit: tiles, other attention, and results against fp64 and the CPU.
"""

from checks.gpu.runner import Planned

BUDGETS = {1: 540.0, 2: 200.0, 3: 600.0}


def _planned(call: int, name: str, module: str, limit: float) -> Planned:
    return Planned(name, f"checks.gpu.checks.{module}", name, limit, call)


CHECKS = [
    _planned(1, "machine", "machine", 25),
    _planned(1, "attention", "attention", 40),
    _planned(1, "profile", "steps", 70),
    _planned(1, "steps", "steps", 160),
    _planned(1, "parts", "steps", 55),
    _planned(1, "peers", "peers", 90),
    _planned(1, "runs", "runs", 100),
    _planned(2, "run", "runs", 200),
    _planned(3, "tiles", "tiles", 120),
    _planned(3, "flex", "flex", 60),
    _planned(3, "kernels", "kernels", 160),
    _planned(3, "families", "families", 120),
    _planned(3, "checkpoints", "checkpoints", 120),
    _planned(3, "device_tests", "device_tests", 150),
]
