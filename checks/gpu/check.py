"""The process of one check: python -m checks.gpu.check MODULE FUNCTION NOTES FOLDER DEVICE small|full"""

import sys
from importlib import import_module
from pathlib import Path

from checks.gpu.report import Report


def main() -> None:
    module, function, notes, folder, device, size = sys.argv[1:]
    getattr(import_module(module), function)(Report(Path(notes), Path(folder), device, size == "small"))


if __name__ == "__main__":
    main()
