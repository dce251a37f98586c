"""How the watchdog treats ranks that hang, start and compile."""

import subprocess
import sys
import time

import torch

from pretrain.config.run_config import ComputeSection
from pretrain.run import watchdog
from pretrain.zero.layers import prepare_layers
from tests.pretrain.rank_processes import on_ranks


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_start_takes_longer_than_a_hang_and_what_follows_it_does_not():
    done = python(
        "import time; from pretrain.run import watchdog\n"
        "with watchdog.watching(7, hang_seconds=1, start_seconds=3600):\n"
        "    time.sleep(3); print('started', flush=True)\n"
        "    watchdog.step_done(); time.sleep(3600)"
    )
    assert (done.returncode, done.stdout) == (1, "started\n")
    assert done.stderr.startswith("rank 7: no progress for 1 s (faults.hang_seconds); all stacks follow\n")
    assert 'File "<string>", line 4 in <module>' in done.stderr


def test_a_hang_is_as_long_as_twenty_usual_steps_and_at_least_two_minutes():
    """One step of an hour among others, as when the disk of the data was away, changes nothing."""
    assert watchdog.hang_limit([0.5] * 19) is None
    assert watchdog.hang_limit([0.5] * 20) == 120
    assert watchdog.hang_limit([6.0] * 20) == 120
    assert watchdog.hang_limit([30.0] * 99 + [3600.0]) == 600


def test_without_a_limit_of_its_own_a_hang_is_as_long_as_the_steps_before_it():
    """20 steps are at least 0.5 s here. The first step is part of the start, and a save is part of no step."""
    done = python(
        "import time; from pretrain.run import watchdog; watchdog.LEAST_SECONDS = 0.5\n"
        "with watchdog.watching(0, None, start_seconds=3600):\n"
        "    for _ in range(20): watchdog.step_done()\n"
        "    time.sleep(1); print('too few steps are known', flush=True)\n"
        "    with watchdog.slow_phase():\n"
        "        for _ in range(20): watchdog.step_done()\n"
        "        time.sleep(1); print('saved', flush=True)\n"
        "    time.sleep(3600)"
    )
    assert (done.returncode, done.stdout) == (1, "too few steps are known\nsaved\n")
    expected = "(20 steps and 0.5 s; faults.hang_seconds sets another limit); all stacks follow"
    assert done.stderr.splitlines()[0] == f"rank 0: no progress for 0.5 s {expected}"


def test_a_start_that_hangs_ends_too():
    done = python(
        "import time; from pretrain.run import watchdog\n"
        "with watchdog.watching(0, hang_seconds=3600, start_seconds=1): time.sleep(3600)"
    )
    assert done.returncode == 1
    assert done.stderr.startswith("rank 0: no progress for 1 s (faults.start_seconds); all stacks follow\n")


def test_native_code_that_hangs_with_the_interpreters_lock_is_caught_as_well():
    done = python(
        "import ctypes; from pretrain.run import watchdog; watchdog.GRACE = 1\n"
        "with watchdog.watching(0, 1, 1): ctypes.PyDLL(None).sleep(3600)"
    )
    assert done.returncode == 1
    assert "Timeout (0:00:0" in done.stderr
    assert 'File "<string>", line 2 in <module>' in done.stderr


def test_a_wait_with_a_limit_of_its_own_is_no_hang_and_what_follows_it_can_be_one():
    done = python(
        "import time; from pretrain.run import watchdog\n"
        "with watchdog.watching(0, 1, 1):\n"
        "    with watchdog.unwatched(): time.sleep(3)\n"
        "    print('waited', flush=True); time.sleep(3600)"
    )
    assert (done.returncode, done.stdout) == (1, "waited\n")


def test_compiling_a_layer_takes_longer_than_a_hang():
    assert on_ranks(1, survives_a_compilation, 3.0, joined=False) == [3.0]


def survives_a_compilation(seconds: float) -> float:
    from pretrain.zero import layers as layerwise

    layerwise.BACKEND = slow = SlowBackend(seconds)  # in a process of this test's own
    model = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    prepare_layers(model, ComputeSection(compile=True), stage=2)
    with watchdog.watching(0, hang_seconds=1, start_seconds=3600):
        watchdog.step_done()
        model[0][0](torch.ones(1, 2))
    return slow.slept


class SlowBackend:
    """A slow backend for torch.compile; it returns the graph unchanged."""

    def __init__(self, seconds: float):
        self.seconds, self.slept = seconds, 0.0

    def __call__(self, graph, inputs):
        time.sleep(self.seconds)
        self.slept += self.seconds
        return graph.forward
