"""The checks, the most telling first. Their limits are about twice what a fast GPU takes."""

from tests.gpu.runner import Planned


def _planned(name: str, module: str, function: str, limit: float) -> Planned:
    return Planned(name, f"tests.gpu.checks.{module}", function, limit)


CHECKS = [
    _planned("machine", "machine", "machine", 60),
    _planned("launch", "runs", "launch", 90),
    _planned("deaths", "runs", "deaths", 120),
    _planned("attention", "attention", "attention", 90),
    _planned("kernels", "kernels", "kernels", 120),
    _planned("families", "families", "families", 120),
    _planned("exactness", "exact", "exactness", 120),
    _planned("checkpoints", "checkpoints", "checkpoints", 120),
    _planned("throughput", "speed", "throughput", 150),
    _planned("profile", "speed", "profile", 60),
    _planned("device_tests", "device_tests", "device_tests", 150),
    _planned("auto_micro_batch", "runs", "auto_micro_batch", 60),
    _planned("ablations", "speed", "ablations", 90),
    _planned("loss_curve", "runs", "loss_curve", 90),
    _planned("generation", "generation", "generation", 60),
    _planned("peers", "peers", "peers", 120),
]
