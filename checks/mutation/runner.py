"""Tries mutants on tests. pytest imports and collects once; each mutant lives in a process that is forked then.

The imports of a test of training take ten seconds, so a pytest of its own for each mutant would take hours. In the
forked process, the function that a mutant changes gets the changed code (`__code__`), wherever it is referred to. The
ranks that a test starts are forked from there in turn, and have the changed code too. What a test starts as a command
of its own, and Ray's workers, have the code of the disk: such a test sees no mutant in them.
"""

import contextlib
import gc
import json
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from checks.mutation.mutants import Mutant


@dataclass(frozen=True)
class Test:
    """A test that passes. `seconds`: CPU time, of its ranks too. `lines`: those of the modules that run, by module."""

    name: str
    seconds: float
    lines: dict[str, list[int]]

    def reaches(self, mutant: Mutant) -> bool:
        first, last = mutant.lines
        return any(first <= line <= last for line in self.lines.get(mutant.module, ()))


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. `state`: seen, survived. `seen_by`: the test that failed, or why none did."""

    state: str
    tests: int
    seen_by: str
    seconds: float


class Runner:
    """A plugin of pytest, which in place of running the collected tests calls `work` with this runner."""

    def __init__(self, root: Path, modules: Sequence[str], work: Callable[["Runner"], None]):
        self.modules, self._root, self._work = modules, root, work

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("a file of tests can't be imported")
        self._items = {item.nodeid: item for item in session.items}
        self._session = session
        for module in self.modules:
            import_module(module.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        files = {str(self._root / module) for module in self.modules}
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename in files:
                self._functions.setdefault(_place(one.__code__), []).append(one)
        self._work(self)
        return True

    def tests(self) -> dict[Path, list[str]]:
        """The names of the tests, by their file."""
        found: dict[Path, list[str]] = {}
        for name, item in self._items.items():
            found.setdefault(item.path, []).append(name)
        return found

    def reach(self, files: Sequence[Sequence[str]], jobs: int) -> Iterator[tuple[int, list[Test]]]:
        """Runs files of tests, given as the names of the tests, without a mutant: a file's place, and what passes."""
        items = [[self._items[name] for name in names] for names in files]
        lines = [_Lines(self._root, self.modules) for _ in files]  # files run beside one another
        tasks = [
            _Task(partial(own.tests, self._session, one), 900, 3600) for own, one in zip(lines, items, strict=True)
        ]
        for place, end in _all(tasks, jobs):
            yield place, [Test(**one) for one in end.result or []]

    def verdicts(self, tries: Sequence[tuple[Mutant, Sequence[Test]]], jobs: int) -> Iterator[tuple[Mutant, Verdict]]:
        """Runs the tests of each mutant until one fails. A mutant that computes or waits many times as long as usual
        counts as seen."""
        tasks = []
        for mutant, tests in tries:
            usual = sum(test.seconds for test in tests)
            names = [test.name for test in tests]
            tasks.append(_Task(partial(self._failing, mutant, names), int(10 + 6 * usual), 90 + 15 * usual))
        for place, end in _all(tasks, jobs):
            mutant, tests = tries[place]
            seen = end.how != "returned" or end.result
            by = end.result if end.how == "returned" else end.how
            yield mutant, Verdict("seen" if seen else "survived", len(tests), by, end.seconds)

    def _failing(self, mutant: Mutant, names: Sequence[str]) -> str:
        """The first test that fails, or nothing."""
        self._change(mutant)
        for item, following in pairwise([*(self._items[name] for name in names), None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._session.testsfailed:
                return item.nodeid
        return ""

    def _change(self, mutant: Mutant) -> None:
        file = str(self._root / mutant.module)
        for code in _codes(compile(mutant.source, file, "exec")):
            if code.co_qualname == mutant.function:
                for function in self._functions.get(_place(code), ()):
                    function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a module's functions and methods, not of the functions inside these."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            if "<locals>" not in one.co_qualname:
                yield from _codes(one)


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class _Lines:
    """The lines of modules that run, in memory that forked processes share: a rank is killed once it has answered."""

    def __init__(self, root: Path, modules: Sequence[str]):
        self._starts, size = {}, 0
        for module in modules:
            self._starts[str(root / module)] = size, module
            size += len((root / module).read_text(encoding="utf-8").splitlines()) + 2
        self._ran = mmap.mmap(-1, size)
        self._of_fixtures: dict[str, bytes] = {}

    def tests(self, session: pytest.Session, items: Sequence[pytest.Item]) -> list[dict[str, Any]]:
        """Runs `items`; returns the fields of a `Test` for each item that passes."""
        found = []
        session.config.pluginmanager.register(self)
        for item, following in pairwise([*items, None]):
            failed, begun = session.testsfailed, sum(os.times()[:4])
            self._ran[:] = bytes(len(self._ran))
            sys.settrace(self._enter)
            threading.settrace(self._enter)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sys.settrace(None)
            fixtures = [self._of_fixtures[name] for name in item.fixturenames if name in self._of_fixtures]
            ran = [any(bits) for bits in zip(self._ran[:], *fixtures, strict=True)]
            lines: dict[str, list[int]] = {}
            for (start, module), (end, _) in pairwise([*self._starts.values(), (len(ran), "")]):
                lines[module] = [number for number, runs in enumerate(ran[start:end]) if runs]
            if session.testsfailed == failed:
                seconds = round(sum(os.times()[:4]) - begun, 3)
                reached = {module: numbers for module, numbers in lines.items() if numbers}
                found.append({"name": item.nodeid, "seconds": seconds, "lines": reached})
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        """What a module's fixture runs counts for all tests that have it, not only for the first."""
        before = self._ran[:]
        self._ran[:] = bytes(len(before))
        result = yield
        if fixturedef.scope != "function":
            self._of_fixtures[fixturedef.argname] = self._ran[:]
        either = int.from_bytes(before, "big") | int.from_bytes(self._ran[:], "big")
        self._ran[:] = either.to_bytes(len(before), "big")
        return result

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if (place := self._starts.get(frame.f_code.co_filename)) is None:
            return None
        start, ran = place[0], self._ran

        def line(frame: FrameType, event: str, argument: object) -> Any:
            ran[start + frame.f_lineno] = 1
            return line

        return line


@dataclass(frozen=True)
class _Task:
    """A function for a process of its own, which may compute and last so many seconds."""

    function: Callable[[], Any]
    cpu_seconds: int
    seconds: float


@dataclass(frozen=True)
class _End:
    """`how`: returned, waits, computes, or the exit code."""

    how: str
    result: Any
    seconds: float


class _Child:
    """A process that is forked for a task."""

    def __init__(self, task: _Task):
        self._begun, self._limit = time.monotonic(), task.seconds
        self._folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_CPU, (task.cpu_seconds, task.cpu_seconds))
                log = os.open(self._folder / "log", os.O_WRONLY | os.O_CREAT)
                for number in (1, 2):
                    os.dup2(log, number)
                os.environ["PYTEST_DEBUG_TEMPROOT"] = str(self._folder)
                (self._folder / "result").write_text(json.dumps(task.function()))
                code = 0
            finally:
                os._exit(code)

    def end(self) -> _End | None:
        """None while the process runs."""
        seconds = time.monotonic() - self._begun
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid and seconds < self._limit:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status) if pid else None
        how = {None: "waits", 0: "returned", -signal.SIGKILL: "computes"}.get(code, f"exit code {code}")
        result = json.loads((self._folder / "result").read_text()) if code == 0 else None
        shutil.rmtree(self._folder, ignore_errors=True)
        return _End(how, result, seconds)


def _all(tasks: Sequence[_Task], jobs: int) -> Iterator[tuple[int, _End]]:
    """The places of tasks and their ends, as they end, `jobs` at a time."""
    waiting, running = list(enumerate(tasks))[::-1], dict[int, _Child]()
    while waiting or running:
        while waiting and len(running) < jobs:
            place, task = waiting.pop()
            running[place] = _Child(task)
        for place, child in list(running.items()):
            if end := child.end():
                del running[place]
                yield place, end
        time.sleep(0.02)
