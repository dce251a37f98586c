"""Runs a peer to its end, through kills if there are any."""

import os
import resource
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kills.history import Kill, Step, read
from kills.peers import FOLDER, Peer, prepare
from kills.record import LINES, WEIGHTS

from checks.prove.proof import kill_family

_PATIENCE = 900.0  # s without a line: the run counts as hanging
_TRIES = 3  # starts in a row that fail by themselves


class Stuck(Exception):
    """A run that nothing brings to its end. The text is the last line of its output."""


@dataclass
class Run:
    """A run to its end.

    Attributes:
        steps: the lines of all attempts.
        kills: the kills that the run met.
        seconds: the time of all attempts together.
        processor: the processor time of all attempts together, in seconds, which other work on the machine changes
            little.
        crashes: the last lines of attempts that failed without having been killed.
        removed: checkpoints that were moved away by hand, since no start succeeded with them.
    """

    folder: Path
    steps: list[Step] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0
    processor: float = 0.0
    crashes: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


def run(peer: Peer, python: Path, work: Path, folder: Path, seed: int, steps: int, kills: Sequence[Kill] = ()) -> Run:
    """Starts the run, kills the run at each of `kills`, and starts the run again each time. Raises Stuck."""
    prepare(peer, work, folder, seed, steps)
    found, left, failed = Run(folder), list(kills), 0
    while not (folder / WEIGHTS).exists():
        before = len(read(folder / LINES))
        began, used = time.monotonic(), _processor()
        ended = _attempt(peer.command(python, work, folder, seed, steps), folder, left[0] if left else None)
        found.seconds += time.monotonic() - began
        found.processor += _processor() - used
        if ended == "killed":
            found.kills.append(left.pop(0))
            failed = 0
            continue
        if (folder / WEIGHTS).exists():
            break
        found.crashes.append(ended.replace(str(folder), "RUN"))
        failed = 1 if len(read(folder / LINES)) > before else failed + 1
        checkpoint = peer.newest(folder)
        if failed > _TRIES or (failed > 1 and checkpoint is None):
            raise Stuck(ended)
        if failed > 1 and checkpoint:  # the second time, a person would look for the cause
            checkpoint.rename(checkpoint.with_name(f"removed-{checkpoint.name}"))
            found.removed.append(checkpoint.name)
    found.steps = read(folder / LINES)
    return found


def _processor() -> float:
    """Seconds of processor time of all processes that this one has started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _attempt(command: list[str], folder: Path, kill: Kill | None) -> str:
    """Runs a command until it ends or its moment comes; returns "killed", or the last line of its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(FOLDER.parent)}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    path, log = folder / LINES, folder / "log.txt"
    before = path.stat().st_size if path.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=FOLDER.parents[1], env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            if kill and _reached(process, path, before, kill.step):
                time.sleep(kill.delay)
                if process.poll() is None:
                    return "killed"
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            raise Stuck(f"no end in {_PATIENCE:.0f} s") from None
        finally:
            kill_family(process)
    if process.returncode == 0:
        return "ended with exit code 0"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"


def _reached(process: subprocess.Popen[bytes], path: Path, before: int, step: int) -> bool:
    """Waits for a line, after the first `before` bytes, of `step` or a later one. False: the process ended before."""
    size, since = before, time.monotonic()
    while process.poll() is None:
        time.sleep(0.005)
        now = path.stat().st_size if path.exists() else 0
        if now > size:
            size, since = now, time.monotonic()
            if any(line.step >= step for line in read(path, before)):
                return True
        if time.monotonic() - since > _PATIENCE:
            raise Stuck(f"no step in {_PATIENCE:.0f} s")
    return False
