"""Runs the checks: see `python -m checks.gpu --help`."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

try:
    from checks.gpu.checks import BUDGETS, CHECKS
    from checks.gpu.runner import Place, run
except ModuleNotFoundError as missing:
    sys.exit(f"{missing} in {sys.executable}; give another by PYTHON=…, or carry the wheels of `make gpu-wheels` here")

_SLOWER = 5  # two cores take long to start processes, and a limit there is against checks that hang


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m checks.gpu", description="Checks training on this machine's GPU.")
    parser.add_argument("--call", type=int, choices=BUDGETS, help="1: speed and faults, 2: a run, 3: results")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda where there is a GPU")
    parser.add_argument("--budget", type=float, help="seconds for all checks; by default 540, 200 or 600 by the call")
    parser.add_argument("--out", type=Path, default=Path("build/gpu.jsonl"), help="a file for the lines")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of the checks and their limits in seconds")
    given = parser.parse_args()
    call = given.call or (0 if given.only or given.list else 1)
    chosen = [check for check in CHECKS if call in (0, check.call) and (not given.only or check.name in given.only)]
    if given.list:
        for check in chosen:
            print(f"{check.call} {check.name:14} {check.limit:5.0f}")
        return 0
    place = Place(given.device or ("cuda" if _gpu_here() else "cpu"))
    budget = given.budget or BUDGETS[max(call, 1)]
    if place.small:
        chosen = [replace(check, limit=_SLOWER * check.limit) for check in chosen]
        budget = given.budget or _SLOWER * budget
    return 1 if run(chosen, place, budget, given.out) else 0


def _gpu_here() -> bool:
    import torch  # takes seconds, which `--list` doesn't need

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
