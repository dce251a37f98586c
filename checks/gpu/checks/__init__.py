"""The checks, the most telling first. Their limits are about twice what a fast GPU takes, without compilations."""

from checks.gpu.runner import Planned


def _planned(
    name: str, module: str, function: str, limit: float, compilations: int = 0, *, tuned: bool = False
) -> Planned:
    return Planned(name, f"checks.gpu.checks.{module}", function, limit, compilations, tuned)


# With each check, the kernels that it asks Triton for, as checks/gpu/compilations.py counts them.
CHECKS = [
    _planned("machine", "machine", "machine", 60),
    _planned("launch", "runs", "launch", 90, 17),
    _planned("deaths", "runs", "deaths", 120, 17),
    _planned("attention", "attention", "attention", 60, 40),
    _planned("kernels", "kernels", "kernels", 60, 70),
    _planned("families", "families", "families", 60, 104),
    _planned("exactness", "exact", "exactness", 120, 20),
    _planned("checkpoints", "checkpoints", "checkpoints", 120, 27),
    _planned("throughput", "speed", "throughput", 150, 24, tuned=True),
    _planned("profile", "speed", "profile", 60, 24, tuned=True),
    _planned("device_tests", "device_tests", "device_tests", 150),
    _planned("auto_micro_batch", "runs", "auto_micro_batch", 60, 43, tuned=True),
    _planned("ablations", "speed", "ablations", 90, 24, tuned=True),
    _planned("loss_curve", "runs", "loss_curve", 90, 17),
    _planned("generation", "generation", "generation", 60, 24, tuned=True),
    _planned("peers", "peers", "peers", 120, tuned=True),
]
