"""Tiles of this project's kernels of attention: how long each kernel takes with each candidate."""

import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from checks.gpu.checks.attention import forms, passes, repeats
from checks.gpu.report import Report
from checks.gpu.trace import OURS, Trace
from checks.gpu.workload import Workload
from pretrain.models.functional.attention_backends import use
from pretrain.models.kernels.tiles import Tiles, tiles_offered

WIDTH = 64  # numbers a head
COMPILERS = 12  # processes
_SQUARE = [(64, 64), (32, 32)]  # of the queries' kernel, which adds up diagonals
_SIDES = [*_SQUARE, (128, 64), (64, 32), (64, 128), (32, 64), (128, 128)]


class Candidate(NamedTuple):
    """Tiles that a kernel is tried with, while the others have their own."""

    kernel: str
    tiles: Tiles


CANDIDATES = [
    Candidate(kernel, Tiles(*sides, warps, stages))
    for kernel in OURS
    for sides, warps, stages in itertools.product(
        _SQUARE if kernel == "backward_queries" else _SIDES, (4, 8), (1, 2, 3)
    )
]


def tiles(report: Report) -> None:
    """A row for each candidate that the GPU takes, in the encoder and the decoder of T5 v1.1 base, and the fastest."""
    work, chosen = Workload(report), CANDIDATES
    if report.small:
        report.skip("all candidates but one", "in fp32 tiles are always the same")
        chosen = CANDIDATES[:1]
    else:  # compiled by many processes at once, into Triton's cache on the disk
        with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
            fit = list(pool.map(partial(_compile, inputs=work.inputs, targets=work.targets), CANDIDATES))
        chosen = [one for one, fits in zip(CANDIDATES, fit, strict=True) if fits]
        report.fact("candidates_that_do_not_fit", fit.count(False))
    taken = forms(work.inputs, work.targets)
    for name in ("encoder", "decoder"):
        found: dict[Candidate, float] = {}
        for one in chosen:
            with report.part(f"{name}: {one}"), _tried(one):
                work_of_form = passes(taken[name], report.device, small=report.small)
                work_of_form()
                sums = Trace.of(work_of_form, report.device).sums(lambda kernel: kernel.ours or "others")
                found[one] = sums[one.kernel if report.cuda else "others"][0] / repeats(report.small)
                report.row("tiles", attention=name, kernel=one.kernel, **one.tiles._asdict(), ms=found[one])
        for kernel in OURS:
            if times := {one.tiles: ms for one, ms in found.items() if one.kernel == kernel}:
                fastest = min(times, key=times.__getitem__)
                report.fact(f"{name}_fastest_{kernel}", list(fastest))


def _compile(one: Candidate, inputs: int, targets: int) -> bool:
    """Runs the kernels on a row, for which Triton compiles them as for many; False if it can't."""
    use("triton")
    with _tried(one):
        try:
            for form in forms(inputs, targets).values():
                passes(form, torch.device("cuda"), small=False, rows=1)()
        except Exception:  # of shared memory that doesn't suffice, or whatever Triton raises
            return False
    return True


@contextmanager
def _tried(one: Candidate) -> Iterator[None]:
    own = tiles_offered()[one.kernel]
    before = own[WIDTH]
    own[WIDTH] = one.tiles
    try:
        yield
    finally:
        own[WIDTH] = before
