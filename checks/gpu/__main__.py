"""Runs the checks: see `python -m checks.gpu --help`."""

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

try:
    from checks.gpu.checks import CHECKS
    from checks.gpu.runner import Lines, Place, run
except ModuleNotFoundError as missing:
    sys.exit(f"{missing} in {sys.executable}; give another by PYTHON=…, or carry the wheels of `make gpu-wheels` here")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m checks.gpu", description="Checks training on this machine's GPU.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda where there is a GPU")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for all checks (default: 600)")
    parser.add_argument("--out", type=Path, help="a file for the lines, besides stdout")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of the checks and their limits in seconds")
    given = parser.parse_args()
    chosen = [check for check in CHECKS if not given.only or check.name in given.only]
    if given.list:
        for check in chosen:
            print(f"{check.name:18} {check.limit:5.0f}")
        return 0
    device = given.device or ("cuda" if _gpu_here() else "cpu")
    with contextlib.ExitStack() as stack:
        outputs = [sys.stdout]
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            outputs.append(stack.enter_context(given.out.open("w", encoding="utf-8")))
        small = device == "cpu"
        if small:  # two cores take long to start processes
            chosen = [replace(check, limit=2 * check.limit) for check in chosen]
        return 1 if run(chosen, Place(device, small), given.budget, Lines(*outputs)) else 0


def _gpu_here() -> bool:
    import torch  # takes seconds, which `--list` doesn't need

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
