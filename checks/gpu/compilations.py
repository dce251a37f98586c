"""Counts the kernels that each check asks Triton for, without a GPU: the limits of the checks follow from them.

python -m checks.gpu.compilations [NAME ...]
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from checks.gpu.checks import CHECKS
from checks.gpu.report import Report
from checks.gpu.runner import FIXED_TILES, Planned
from checks.gpu.workload import pass_through
from pretrain.kernels import compilation

COMPILING = {check.name: check for check in CHECKS if check.compilations}


class _CountedError(Exception):
    pass


class _Counting(Report):
    """A report "on a GPU" that counts the kernels of a check, whose tensors are on the CPU, and ends it there."""

    def __init__(self, folder: Path):
        super().__init__(folder / "notes", folder, "cpu", small=False)
        self.count = 0

    cuda = True  # type: ignore[assignment]

    def compile_ahead(self, launches) -> None:
        self.count = len(compilation.requests(launches))
        raise _CountedError


@contextlib.contextmanager
def _h100(tuned: bool) -> Iterator[None]:
    """Triton and this project believe in an H100; tensors are on the CPU."""
    with (
        patch.object(driver, "_active", compilation._Driver(GPUTarget("cuda", 90, 32))),
        patch.object(compilation._Driver, "get_current_stream", lambda *_: 0, create=True),
        patch.object(torch.Tensor, "is_cuda", True),
        patch.dict(os.environ, {} if tuned else {FIXED_TILES: "1"}),
    ):
        yield


def counted(check: Planned) -> int:
    """How many kernels a check asks Triton for."""
    with _h100(check.tuned), tempfile.TemporaryDirectory() as folder:
        if check.module.endswith(".runs"):  # in processes of their own
            return _of_a_run(check.tuned)
        report = _Counting(Path(folder))
        with contextlib.suppress(_CountedError):
            getattr(import_module(check.module), check.function)(report)
        return report.count


def _of_a_run(tuned: bool) -> int:
    """They train with rows with padding and without, and `auto_micro_batch` with the model of `throughput`."""
    from checks.gpu.checks.runs import SMALL

    model = {**SMALL, "d_kv": 64 if tuned else SMALL["d_kv"]}
    return len(compilation.requests(lambda: pass_through(model, torch.device("cpu"), 64, 32)))


def main() -> int:
    wrong = 0
    for name in sys.argv[1:] or COMPILING:
        check = COMPILING[name]
        found = counted(check)
        wrong += found != check.compilations
        print(f"{name:18} {found:4} kernels" + (f", not {check.compilations}" * (found != check.compilations)))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
