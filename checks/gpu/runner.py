"""Runs checks one after another within a budget of seconds, each in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from checks.gpu.report import findings

ROOT = Path(__file__).parents[2]
_LEAST = 0.25  # the share of a check's limit without which it isn't started
_AFTER = 1.0  # s kept back to end a check's processes and write its line
_SHOWN = 2000  # characters of a failed check's output


@dataclass(frozen=True)
class Planned:
    """A check: `function` of `module`, which is a Check, the most seconds that it may take, and its call."""

    name: str
    module: str
    function: str
    limit: float
    call: int = 1


@dataclass(frozen=True)
class Place:
    """Where checks run: on cpu or cuda."""

    device: str

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a check: no network, and nothing of DeepSpeed compiled. On `cpu` no GPU is seen, and
        Triton's kernels run in its interpreter."""
        own = {
            "DS_ACCELERATOR": self.device,
            "DS_BUILD_OPS": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_OFFLINE": "1",
        }
        if self.small:
            own |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        return {**os.environ, **own}


def run(checks: Iterable[Planned], place: Place, budget: float, lines: Path) -> int:
    """Runs the checks in order. Returns the number that failed.

    The file `lines` gets each finding as it is made, a closing line for each check, and a summary. These two are also
    printed. The outcome of a check is one of

    - passed: every expectation held; its lines say what it skipped.
    - failed: an expectation didn't hold, or the process ended with an error.
    - timeout: it was killed at its limit, or when the budget was spent.
    - unreached: too little of the budget was left to start it.
    """
    started = time.monotonic()
    outcomes: dict[str, list[str]] = {}
    lines = lines.absolute()
    lines.parent.mkdir(parents=True, exist_ok=True)
    lines.write_text("", encoding="utf-8")
    for check in checks:
        left, limit = budget - (time.monotonic() - started) - _AFTER, check.limit
        if left < _LEAST * limit:
            line: dict[str, Any] = {"check": check.name, "outcome": "unreached", "seconds_left": round(max(left, 0), 1)}
        else:
            line = _run_one(check, place, min(limit, left), lines)
        _write(line, lines)
        outcomes.setdefault(line["outcome"], []).append(check.name)
    _write({"summary": outcomes, "device": place.device, "seconds": round(time.monotonic() - started, 1)}, lines)
    return sum(len(outcomes.get(bad, [])) for bad in ("failed", "timeout"))


def _write(line: dict[str, Any], lines: Path) -> None:
    text = json.dumps(line, ensure_ascii=False)
    print(text, flush=True)
    whole = lines.read_bytes()[-1:] in (b"", b"\n")  # else a check was killed while it wrote
    with lines.open("a", encoding="utf-8") as file:
        file.write(text + "\n" if whole else f"\n{text}\n")


def _run_one(check: Planned, place: Place, limit: float, lines: Path) -> dict[str, Any]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"gpu-{check.name}-", ignore_cleanup_errors=True) as folder:
        output = Path(folder, "output")
        arguments = [check.module, check.function, check.name, str(lines), folder, place.device]
        with output.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "checks.gpu.check", *arguments],
                cwd=folder,
                env=place.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process, folder)
        wrong = dict(findings(lines, check.name, "wrong"))
        line: dict[str, Any] = {
            "check": check.name,
            "outcome": "timeout" if code is None else "failed" if code or wrong else "passed",
            "seconds": round(time.monotonic() - started, 1),
            "limit": round(limit, 1),
            "held": sum(1 for _ in findings(lines, check.name, "held")),
            "wrong": wrong,
        }
        if code != 0:
            line |= {"exit_code": code, "output": output.read_text(errors="replace")[-_SHOWN:]}
        return line


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    """Kills a check and every process that it started and that still runs."""
    for one in list(_started_by(process, folder)):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _started_by(process: subprocess.Popen[bytes], folder: str) -> Iterator[psutil.Process]:
    """Processes that a check left: its descendants, and those in its folder whose parents have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from psutil.Process(process.pid).children(recursive=True)
    for one in psutil.process_iter():
        try:
            if one.pid != process.pid and one.cwd().startswith(folder):
                yield one
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
            continue
