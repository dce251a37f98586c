"""Runs the cells of the matrix: on this machine, or on two hosts of it, one after the other."""

import contextlib
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import psutil

from checks.faults import cells, verdicts
from checks.faults.cells import Cell
from checks.faults.planted import Planted
from checks.faults.slow_link import slow
from checks.faults.verdicts import Verdict
from tests.conftest import run, write_c4, write_corpus_file
from tests.support.ports import free_port
from tests.support.processes import processes_with
from tests.support.runs import run_file
from tests.support.two_hosts import Hosts

SECONDS = 300.0  # for a command
SLOW_LINK, SLOW_FOR, CUT_FOR = 0.05, 4.0, 3.0  # s each way, and for how long
_STARTS = 3
HERE = Path(__file__).parent
LAUNCH = str(Path(sys.executable).with_name("launch"))


class Matrix:
    """Runs cells below `folder`, on a corpus made there, beside the undisturbed run.

    Its limits of seconds, and those of its runs, are `patience` times as long as on a quiet machine. `hunting`: its
    runs name the callbacks of examples/fault_hunting.
    """

    def __init__(self, folder: Path, patience: float = 1.0, hunting: bool = True):
        self._hunting = hunting
        self.folder, self._patience, self._stack = folder, patience, contextlib.ExitStack()
        self.corpus = folder / "corpus"
        if not (self.corpus / "manifest.json").exists():
            write_c4(folder / "c4.json.gz", 200)
            done = run("data-pipeline", "build", write_corpus_file(folder / "corpus.yaml"))
            assert done.returncode == 0, done.stderr
        whole = folder / "undisturbed"
        if not (whole / "done").exists():
            shutil.rmtree(whole, ignore_errors=True)
            path = self._run_file(whole, Cell(-1, "SIGKILL", "step"))
            assert self._started(path, _local(path, cells.RANKS), self._environment(whole), None) == 0
            (whole / "done").touch()
        self.undisturbed = verdicts.outcome(whole)
        assert len(self.undisturbed.rows) == cells.STEPS

    def __enter__(self) -> "Matrix":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def hosts(self) -> Hosts:
        folder = self.folder / "hosts"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        hosts = Hosts(folder)
        self._stack.callback(hosts.stop)
        hosts.start()
        return hosts

    def judged(self, cell: Cell) -> Verdict:
        """Runs a cell, and says what became of it."""
        began, folder = time.monotonic(), self.folder / f"cell-{cell.number}"
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.ExitStack() as stack:
            uri = stack.enter_context(_broken_mlflow(cell.fault)) if cell.fault in cells.MLFLOW else None
            path = self._run_file(folder, cell, uri)
            codes = self._codes(cell, path)
        left = self._end_those_left(cell, path)
        addresses = self.hosts.addresses if cell.hosts == 2 else []
        verdict = verdicts.judged(cell, codes, folder, self.undisturbed, left, addresses)
        verdict.wall = round(time.monotonic() - began, 1)
        return verdict

    def _codes(self, cell: Cell, path: Path) -> list[int]:
        """The exit codes of the command, which is started again where a user would."""
        marker, codes = path.with_name("marker"), list[int]()
        planted = Planted(cell.fault, cell.point, cell.rank, cell.from_step, cell.attempt, str(marker))
        environment = self._environment(path.parent)
        if cell.fault in cells.MLFLOW:
            marker.touch()
        else:
            environment["FAULT"] = json.dumps(asdict(planted))
        while len(codes) < _STARTS:
            ranks = cell.ranks_after if codes else cells.RANKS
            command = _local(path, ranks) if cell.hosts == 1 else self._over_hosts(path, cell)
            act = self._act(cell) if not marker.exists() else None
            codes.append(self._started(path, command, environment, act))
            if codes == cell.codes or codes != cell.codes[: len(codes)]:
                break
            self._left(cell, path)
        return codes

    def _started(
        self, path: Path, command: list[str], environment: dict[str, str], act: Callable[[int], None] | None
    ) -> int:
        """The exit code of a command. `act` is called with its process once the cell's fault has happened."""
        marker, deadline = path.with_name("marker"), time.monotonic() + self._patience * SECONDS
        with path.with_name("stderr").open("a") as stderr, path.with_name("stdout").open("a") as stdout:
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    if act and marker.exists():
                        act(process.pid)
                        act = None
                    time.sleep(0.02)
                if process.poll() is None:
                    stderr.write("never ended\n")
            finally:
                process.kill()
        return process.wait()

    def _environment(self, folder: Path) -> dict[str, str]:
        rows = folder / "rows"
        rows.mkdir(exist_ok=True)
        search = [str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
        own = {"MATRIX_CELL": str(folder), "RECORDED_ROWS": str(rows), "PYTHONPATH": os.pathsep.join(search)}
        return {**os.environ, **own}

    def _run_file(self, folder: Path, cell: Cell, mlflow: str | None = None) -> Path:
        corpus = str(self.corpus)
        data = {"train": [{"corpus": corpus}], "validation": [{"corpus": corpus}], "lanes": 8, "workers": cell.workers}
        return run_file(
            folder,
            self.corpus,
            run={"max_steps": cells.STEPS, "directory": str(folder / "run")},
            data=data,
            checkpoint={"every_steps": cells.SAVE_EVERY, "keep_last": 2},
            evaluation=[{"hook": "validation_loss", "every_steps": 10}],
            callbacks=cells.HUNTING if self._hunting else [],
            faults={
                "hang_timeout_seconds": self._patience * cells.HANG_SECONDS,
                "start_timeout_seconds": self._patience * cells.START_SECONDS,
                "max_restarts": cell.restarts,
            },
            tracking={"mlflow": mlflow and {"uri": mlflow, "experiment": "tests"}, "log_every_steps": 1},
        )

    def _over_hosts(self, path: Path, cell: Cell) -> list[str]:
        hostfile = path.with_name("hostfile")
        hostfile.write_text("".join(f"{address} slots=1\n" for address in self.hosts.addresses))
        least = ["--min-nodes", "1"] if cell.ranks_after == 1 else []
        return [LAUNCH, "hosts", str(path), "--hostfile", str(hostfile), "--ssh", self.hosts.ssh, *least]

    def _act(self, cell: Cell) -> Callable[[int], None] | None:
        """What is done to the head or to a host when the fault's rank has reached its point."""
        return {
            "the head killed": lambda head: os.kill(head, signal.SIGKILL),
            "a lost host": lambda _: self.hosts.kill_all(cell.rank),
            "a slow host": lambda _: self._slow(cell.rank),
            "a host cut off for a while": lambda _: self._cut_off(cell.rank, CUT_FOR),
            "a host cut off": lambda _: self._cut_off(cell.rank, cells.NO_WORD_SECONDS + 5),
        }.get(cell.fault)

    def _slow(self, index: int) -> None:
        with slow(self.hosts, index, seconds=SLOW_LINK, loss=0.01):
            time.sleep(SLOW_FOR)

    def _left(self, cell: Cell, path: Path) -> list[psutil.Process]:
        """The processes of a cell that are left after a while; agents end when they have lost their head."""
        seconds = self._patience * 10 + (cells.NO_WORD_SECONDS if cell.hosts == 2 else 0)
        deadline = time.monotonic() + seconds
        while True:
            left = processes_with(MATRIX_CELL=str(path.parent))
            if cell.hosts == 2:
                left += [process for index in range(2) for process in self._of_host(index)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)

    def _of_host(self, index: int) -> Iterator[psutil.Process]:
        for process in self.hosts.busy(index):
            with contextlib.suppress(psutil.NoSuchProcess):
                yield psutil.Process(process)

    def _end_those_left(self, cell: Cell, path: Path) -> list[str]:
        """The commands of the processes that outlive their cell, which are killed then."""
        named = []
        for process in self._left(cell, path):
            with contextlib.suppress(psutil.Error):
                named.append(" ".join(process.cmdline())[:80])
                process.kill()
        return named

    def _cut_off(self, index: int, seconds: float) -> None:
        self.hosts.cut_off(index)
        time.sleep(seconds)
        self.hosts.connect(index)


def _local(path: Path, ranks: int) -> list[str]:
    return [LAUNCH, "local", str(path), "--ranks", str(ranks)]


@contextlib.contextmanager
def _broken_mlflow(fault: str) -> Iterator[str]:
    """The address of an MLflow server that refuses connections, that never answers, or that answers 500."""
    if fault == "MLflow refused":
        yield f"http://127.0.0.1:{free_port()}"
    elif fault == "MLflow hanging":
        with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
    else:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Failing) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()


class _Failing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(500)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass
