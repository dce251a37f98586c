"""The checks, the most telling first. Their limits are about twice what a fast GPU takes, and 1.4 s for each of the
kernels that Triton compiles."""

from checks.gpu.runner import Planned


def _planned(name: str, module: str, function: str, limit: float) -> Planned:
    return Planned(name, f"checks.gpu.checks.{module}", function, limit)


CHECKS = [
    _planned("machine", "machine", "machine", 60),
    _planned("launch", "runs", "launch", 120),
    _planned("deaths", "runs", "deaths", 150),
    _planned("attention", "attention", "attention", 120),
    _planned("kernels", "kernels", "kernels", 160),
    _planned("families", "families", "families", 210),
    _planned("exactness", "exact", "exactness", 150),
    _planned("checkpoints", "checkpoints", "checkpoints", 160),
    _planned("throughput", "speed", "throughput", 190),
    _planned("profile", "speed", "profile", 100),
    _planned("device_tests", "device_tests", "device_tests", 150),
    _planned("auto_micro_batch", "runs", "auto_micro_batch", 130),
    _planned("ablations", "speed", "ablations", 130),
    _planned("loss_curve", "runs", "loss_curve", 120),
    _planned("generation", "generation", "generation", 100),
    _planned("peers", "peers", "peers", 120),
]
