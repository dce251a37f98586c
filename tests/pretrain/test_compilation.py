"""Triton's compilations: how many there are, and that those made beforehand are found again. No GPU is needed."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from pretrain.kernels import compilation, cross_entropy, tuning
from pretrain.kernels.attention import flash_attention
from pretrain.kernels.backward import backward_diagonals, backward_keys, backward_queries
from pretrain.kernels.forward import forward
from pretrain.kernels.labels import labels

HEADS, D_KV = 3, 16


@pytest.fixture(autouse=True)
def h100(monkeypatch) -> None:
    """Triton believes in an H100, for which it compiles but on which nothing can run."""

    class Driver(compilation._Driver):
        def get_current_stream(self, _: object = None) -> int:
            return 0

    monkeypatch.setattr(driver, "_active", Driver(GPUTarget("cuda", 90, 32)))
    for kernel in (forward, backward_queries, backward_keys, backward_diagonals):
        kernel.device_caches.clear()


def attend(rows: int, queries: int, keys: int, *, causal: bool = False, bias: bool = False, padded: bool = False):
    """Forward and backward, with the strides that joined products give."""

    def heads(length: int) -> torch.Tensor:
        return torch.zeros(rows, length, HEADS * D_KV, dtype=torch.bfloat16).unflatten(-1, (-1, D_KV)).transpose(1, 2)

    inputs = [heads(queries), heads(keys), heads(keys)]
    inputs += [torch.zeros(HEADS, queries + keys - 1, dtype=torch.bfloat16)] if bias else []
    inputs = [one.requires_grad_() for one in inputs]
    seen = labels(queries, torch.ones(rows, keys), None, None) if padded else None
    out = flash_attention(*inputs[:3], inputs[3] if bias else None, seen, causal)[0]
    torch.autograd.grad(out, inputs, torch.zeros_like(out))


def t5_step(rows: int, inputs: int, targets: int) -> None:
    attend(rows, inputs, inputs, bias=True, padded=True)
    attend(rows, targets, targets, bias=True, causal=True)
    attend(rows, targets, inputs, padded=True)


def counted(work: Callable[[], object]) -> Counter[str]:
    """The number of compilations of each kernel."""
    return Counter(compilation.name_of(one).rsplit(".", 1)[1] for one in compilation.requests(work))


T5_KERNELS = {"forward": 3, "backward_queries": 3, "backward_keys": 3, "backward_diagonals": 2}


def test_ragged_widths_are_compiled_once():
    """Three forms of attention, of which two have a bias. Widths that are 1, odd, or multiples of 16 need no others."""
    draw = random.Random(0)
    widths = [(512, 114), (512, 128), (1, 1), *((draw.randint(200, 512), draw.randint(20, 114)) for _ in range(20))]
    assert counted(lambda: [t5_step(draw.randint(1, 3), *some) for some in widths]) == T5_KERNELS


def test_each_number_of_targets_has_the_kernels_of_the_first():
    def loss(targets: int) -> None:
        logits, ids = torch.zeros(targets, 100, dtype=torch.bfloat16), torch.zeros(targets, dtype=torch.long)
        _, log_z = cross_entropy.losses(logits, ids, 0.0, 0.0)
        cross_entropy.logits_to_grad_(logits, ids, log_z, log_z, log_z, 0.0)

    counts = counted(lambda: [loss(targets) for targets in (1, 2, 3, 16, 31, 64)])
    assert counts == {"forward_rows": 1, "backward_rows": 1}


def test_every_choice_of_tiles_is_compiled_unless_they_are_fixed(monkeypatch):
    monkeypatch.setattr(tuning, "_measures", lambda _: True)
    every = {
        kernel: number * len(tuning.choices(kernel, torch.bfloat16, D_KV)) for kernel, number in T5_KERNELS.items()
    }
    assert counted(lambda: t5_step(2, 64, 32)) == every


def test_the_choice_is_measured_for_each_size_of_batch(monkeypatch):
    measured = []
    monkeypatch.setattr(tuning, "_measures", lambda _: True)
    monkeypatch.setattr(tuning, "_milliseconds", lambda _, tiles: measured.append(tiles) or float(len(measured)))
    monkeypatch.setattr(tuning, "_chosen", {})
    launched: list[tuning.Tiles] = []
    for rows in (4, 4, 64):
        like = torch.zeros(rows, HEADS, 8, D_KV, dtype=torch.bfloat16)
        tuning.fastest("forward", like, (rows,), launched.append)
    assert len(measured) == 2 * len(tuning.choices("forward", torch.bfloat16, D_KV))


def test_the_environment_fixes_tiles(monkeypatch):
    like = torch.zeros(1, dtype=torch.bfloat16, device="meta").as_subclass(OnGpu)
    assert tuning._measures(like)
    monkeypatch.setenv(tuning.FIXED, "1")
    assert not tuning._measures(like)


class OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


@pytest.mark.slow
def test_what_other_processes_compiled_is_found_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compilation.requests(lambda: attend(2, 64, 64))
    compilation.compile_requests(found, 2)
    hits = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    for one in found:
        compilation._compile(one)
    assert hits == [True] * 3
    monkeypatch.setattr(compilation.subprocess, "Popen", None)
    compilation.compile_requests(found, 2)  # starts no process


def test_compilations_are_noted_as_they_begin_and_end(monkeypatch):
    """A kernel that has too little shared memory ends in an error, of which Triton itself doesn't tell."""
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, None)
    monkeypatch.setattr(compilation, "_note", None)
    noted: list[bool] = []
    compilation.watch(noted.append)
    assert counted(lambda: attend(2, 64, 64)).total() == 3
    assert noted == []  # found out, but not compiled
    assert not knobs.runtime.jit_cache_hook(compile={})
    knobs.runtime.jit_post_compile_hook(compile={})
    assert noted == [True, False]

    def breaks(_: tuning.Tiles) -> None:
        knobs.runtime.jit_cache_hook(compile={})
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr("triton.testing.do_bench", lambda work, **_: work())
    assert tuning._milliseconds(breaks, tuning.Tiles(128, 128, 8, 2)) == float("inf")
    assert noted == [True, False, True, False]
