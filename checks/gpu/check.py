"""The process of one check: python -m checks.gpu.check MODULE FUNCTION NOTES FOLDER DEVICE small|full"""

import sys
from importlib import import_module
from pathlib import Path

from checks.gpu.report import Report


def main() -> None:
    module, function, notes, folder, device, size = sys.argv[1:]
    if device == "cuda":
        from pretrain.functional.attention import use  # imports PyTorch, which a check that breaks doesn't need

        use("triton")  # in this process; runs choose by themselves
    getattr(import_module(module), function)(Report(Path(notes), Path(folder), device, size == "small"))


if __name__ == "__main__":
    main()
