"""Runs this project's commands in the test's own process."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest


def run_here(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the command `name` with its output captured, like `tests.conftest.run` but in this process.

    Ray, once a build has started it, stays up for the builds that follow, with the workers it has: a small build then
    takes a seventh of the CPU time. `ray.num_cpus` is therefore ignored from the second build on.
    """
    return main_here(import_module(f"{name.replace('-', '_')}.cli").main, name, *arguments)


def main_here(main: Callable[[], None], name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs `main`, which is that of the command `name`."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("COLUMNS", "120")
        patch.setattr("data_pipeline.base.progress._SECONDS_BETWEEN_LINES", 86_400)  # what is printed is the same
        patch.setattr(sys, "argv", [name, *map(os.fspath, arguments)])
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(errors))
        ended = stack.enter_context(pytest.raises(SystemExit))
        main()
    code = int(ended.value.code or 0)
    return subprocess.CompletedProcess([name, *arguments], code, out.getvalue(), errors.getvalue())


def refused_here(code: int, name: str, *arguments: str | Path) -> str:
    """The one line in which a command says why it ends with `code`."""
    done = run_here(name, *arguments)
    (line,) = done.stderr.splitlines()
    assert done.returncode == code, line
    return line


def done_here(name: str, *arguments: str | Path) -> str:
    """What a command prints that must not fail."""
    done = run_here(name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
