"""The process of one check: python -m checks.gpu.check MODULE FUNCTION NAME LINES FOLDER DEVICE"""

import sys
from importlib import import_module
from pathlib import Path

from checks.gpu.report import Report
from data_pipeline.base.processes import importing


def main() -> None:
    module, function, name, lines, folder, device = sys.argv[1:]
    if device == "cuda":  # as a run does; a check that is planted in a test needs no PyTorch
        from pretrain.config.run_config import ComputeSection
        from pretrain.models.functional.attention_backends import use
        from pretrain.training.run import configure_arithmetic

        configure_arithmetic(ComputeSection())
        use("triton")
    with importing():
        check = getattr(import_module(module), function)
    check(Report(name, Path(lines), Path(folder), device))


if __name__ == "__main__":
    main()
