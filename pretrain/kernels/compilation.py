"""Triton's kernels compiled before their first launch, in several processes at once.

Triton compiles a kernel when it is first launched, one after the other, at about a second each. `requests` finds out
which kernels some work would launch, without a launch; `compile_requests` compiles them into Triton's cache on disk,
from which the launches then take them.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

_recorded: dict[str, None] | None = None  # what `requests` has found so far
_note: Callable[[bool], object] | None = None  # who hears of compilations


def is_recording() -> bool:
    """Whether launches are recorded now. They compute nothing then."""
    return _recorded is not None


def requests(work: Callable[[], object]) -> list[str]:
    """What `work` would have to compile, each in the form that `compile_requests` takes.

    `work` runs without these kernels: they are neither compiled nor launched, and what they would write stays as it is
    in memory. Kernels that this process has compiled before are launched.
    """
    global _recorded
    found = _recorded = {}
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, _record
    try:
        work()
    finally:
        _recorded, knobs.runtime.jit_cache_hook = None, before
    return list(found)


def compile_requests(found: Sequence[str], processes: int) -> None:
    """Compiles `found` in at most `processes` processes, unless that was done before.

    What can't be compiled is left to its first launch.
    """
    left = [one for one in found if not _marker(one).exists()]
    shares = [left[first::processes] for first in range(min(processes, len(left)))]
    started = []
    for share in shares:
        with tempfile.TemporaryFile() as file:  # a pipe would hold the next process up until this one reads
            file.write(json.dumps(share).encode())
            file.seek(0)
            started.append(subprocess.Popen([sys.executable, "-m", __name__], stdin=file, stdout=subprocess.DEVNULL))
    for process in started:
        process.wait()


def compile_ahead(work: Callable[[], object], processes: int | None = None) -> int:
    """Compiles what `work` would have to, in `processes` processes, by default one a core. Returns the number."""
    found = requests(work)
    compile_requests(found, processes or len(os.sched_getaffinity(0)))
    return len(found)


def watch(note: Callable[[bool], object]) -> None:
    """From now on, `note` hears when the compilation of a launched kernel begins (True) and ends (False)."""
    global _note
    _note = note
    knobs.runtime.jit_cache_hook = lambda **_: note(True)
    knobs.runtime.jit_post_compile_hook = lambda **_: note(False)


def failed() -> None:
    """Notes that a compilation has ended with an error: Triton calls no hook then."""
    if _note is not None:
        _note(False)


def _record(*, compile: Mapping[str, object], **_: object) -> bool:
    """Triton's hook: notes a kernel, and answers that it needs no compilation."""
    assert _recorded is not None
    target = driver.active.get_current_target()
    _recorded[json.dumps([vars(target), compile["specialization_data"]])] = None
    return True


def name_of(request: str) -> str:
    """The kernel that a request names, with its module."""
    return json.loads(json.loads(request)[1])["name"]


def _function(request: str) -> JITFunction:
    module, name = name_of(request).rsplit(".", 1)
    return getattr(import_module(module), name)


def _marker(request: str) -> Path:
    """The file that says that a request is compiled, by this version of Triton and from this source."""
    content = "\n".join([request, _function(request).cache_key, triton.__version__])
    return Path(knobs.cache.dir, f"compiled-{hashlib.sha256(content.encode()).hexdigest()}")


class _Driver:
    """Triton's driver of a GPU that isn't there: compilers ask it for the target alone."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def _compile(request: str) -> None:
    target, data = json.loads(request)
    driver.set_active(_Driver(GPUTarget(**target)))
    _function(request).preload(data)
    _marker(request).touch()


def main() -> None:
    for request in json.load(sys.stdin):
        try:
            _compile(request)
        except Exception as error:
            print(f"{name_of(request)} isn't compiled beforehand: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
