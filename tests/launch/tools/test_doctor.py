"""`launch doctor` on a healthy machine and on broken ones, which are broken for real."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from launch.tools.doctor import machine, ranks
from launch.tools.doctor.checks import Check, Finding, Settings
from launch.tools.doctor.doctor import doctor as examine
from launch.tools.doctor.doctor import machines, other_versions, report
from tests.support.in_process import run_here
from tests.support.mounts import mounted
from tests.support.ports import free_port
from tests.support.runs import run_file as write_run_file
from tests.support.tables import each


def doctor(*arguments: str | Path) -> list[str]:
    return [str(Path(sys.executable).with_name("launch")), "doctor", *map(str, arguments)]


@pytest.mark.slow
def test_a_healthy_machine_has_no_errors_and_is_as_it_was(small_corpus, tmp_path):
    path = write_run_file(tmp_path, small_corpus)
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(doctor(path, "--ranks", "2", "--json"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [Finding(**one) for one in json.loads(done.stdout)]
    assert {finding.check for finding in findings} >= {
        *("versions", "GPUs", "memory", "shared memory", "run directory", "file locks"),
        *("run file", "all-reduce"),
    }
    (sum_over_ranks,) = (finding for finding in findings if finding.check == "all-reduce")
    assert sum_over_ranks.found.startswith("2 ranks, ")
    assert sorted(tmp_path.iterdir()) == before


def test_a_broken_machine_gets_a_line_for_each_error_within_80_columns(tmp_path, monkeypatch):
    """Another DeepSpeed, a shared memory of 1 MiB and a missing corpus."""
    planted = tmp_path / "site/deepspeed-0.1.0.dist-info"
    planted.mkdir(parents=True)
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1.0\n")
    monkeypatch.setenv("PYTHONPATH", f"{planted.parent}:{os.environ.get('PYTHONPATH', os.getcwd())}")  # noqa: PTH109
    path = write_run_file(tmp_path, tmp_path / "nothing")
    done = mounted(Path("/dev/shm"), "size=1m", doctor(path), tmp_path / "errors")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines)  # a word is never cut
    errors = [line.removeprefix("error    ").partition(";")[0] for line in lines if line.startswith("error")]
    assert errors[0] == "versions: deepspeed 0.1.0"
    assert errors[1].startswith("shared memory: 1.0 MB free in /dev/shm")
    assert errors[2].startswith("run file:")
    assert lines[-1].startswith("3 errors would stop a run")


@each("options, reason", [("size=1m", "No space left on device"), ("ro", "Read-only file system")])
def test_a_run_directory_that_cannot_be_written_is_an_error(tmp_path, options, reason):
    code = (
        "import sys; from launch.tools.doctor import checks, machine\n"
        "(finding,) = machine.run_directory(checks.Settings(directory=f'{sys.argv[1]}/a/run'))\n"
        "print(finding.level, finding.found)"
    )
    done = mounted(
        tmp_path / "disk", options, [sys.executable, "-c", code, str(tmp_path / "disk")], tmp_path / "errors"
    )
    assert done.stdout == f"error {tmp_path}/disk: {reason}\n", done.stderr


def locks_in(directory: Path, locked: Path | None = None) -> Finding:
    """The finding about a file that another node has locked, or about none."""
    findings = machine.run_directory(Settings(directory=str(directory), locked=str(locked) if locked else None))
    return next(one for one in findings if one.check == "file locks")


def test_locks_of_other_processes_count_and_a_file_of_another_node_must_be_there(tmp_path, monkeypatch):
    with machine.locked_file(tmp_path) as locked:
        assert locks_in(tmp_path, locked).level == "ok"
    monkeypatch.setattr(machine, "_SECONDS_TO_SEE", 0)
    gone = locks_in(tmp_path, locked)
    assert (gone.level, gone.expected) == ("error", "one file system for all nodes")
    (unlocked := tmp_path / "unlocked").touch()
    found = locks_in(tmp_path, unlocked)
    assert (found.level, found.expected) == ("warning", "locks that hold on every node")
    assert list(tmp_path.iterdir()) == [unlocked]


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("fcntl.flock", flock)
    locks = locks_in(tmp_path)
    assert (locks.level, locks.found) == ("warning", "no file locks here (Operation not supported)")
    assert locks.remedy.startswith("nothing prevents a second run in this directory")


@pytest.mark.slow
def test_a_check_that_hangs_is_ended_and_named(small_corpus, tmp_path, monkeypatch, capsys):
    """The server never answers, and the check itself would wait for 10 s."""
    monkeypatch.setattr("launch.tools.doctor.doctor.NODE_CHECKS", [Check("tracking", "machine:tracking", 3)])
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"tracking.mlflow.uri=http://127.0.0.1:{server.getsockname()[1]}"
        assert examine(*machines(1, None, [], None), write_run_file(tmp_path, small_corpus), [uri], True) == 1
    findings = [Finding(**one) for one in json.loads(capsys.readouterr().out)]
    assert [one.found for one in findings if one.level == "error"] == ["no answer within 3 s"]
    assert findings[0].check == "tracking"
    assert findings[-1].found.startswith("one rank on ")


class Answer(BaseHTTPRequestHandler):
    """MLflow's answer to those who log in."""

    def do_POST(self) -> None:
        is_me = self.headers["Authorization"] == "Basic bWU6c2VjcmV0"  # me:secret
        self.send_response(200 if is_me else 401)
        self.end_headers()
        self.wfile.write(b"{}" if is_me else b"You are not authenticated.")

    def log_message(self, *_: object) -> None:
        pass


def test_a_tracking_server_is_asked_with_the_login_and_the_password_is_not_shown(monkeypatch):
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    with HTTPServer(("127.0.0.1", free_port()), Answer) as server:  # nobody else gets its port when it has gone
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"127.0.0.1:{server.server_port}"
        asked = {
            login: machine.tracking(Settings(tracking=f"http://{login}{at}"))[0]
            for login in ("me:secret@", "me:wrong@", "")
        }
        server.shutdown()
    refused = "API request to endpoint /api/2.0/mlflow/experiments/search failed with error code 401"
    assert {login: (one.level, one.found.partition(" != 200")[0]) for login, one in asked.items()} == {
        "me:secret@": ("ok", f"http://me:***@{at} answers"),
        "me:wrong@": ("warning", f"http://me:***@{at}: {refused}"),
        "": ("warning", f"http://{at}: {refused}"),
    }
    assert "set MLFLOW_TRACKING_USERNAME" in asked["me:wrong@"].remedy
    (gone,) = machine.tracking(Settings(tracking=f"http://{at}"))
    assert (gone.level, gone.found) == ("warning", f"http://{at}: Connection refused")


def test_without_a_server_nothing_is_asked():
    assert [machine.tracking(Settings(tracking=uri)) for uri in (None, "sqlite:///runs/mlflow.db")] == [[], []]


def test_bandwidth_is_that_of_a_ring():
    """In a ring each of 4 ranks sends 2·3/4 of the bytes."""
    assert ranks.speed(4, 10**9, 0.5, "NVIDIA H100").found == "4 ranks, 954 MiB at 3 GB/s (NVIDIA H100)"
    assert ranks.speed(1, 10**9, 0.5, None).found == "one rank on the CPU, so nothing is exchanged"


@each(
    "gpus, found",
    [
        ([("H100", 0), ("H100", 1e9)], {("ok", "2 × H100")}),
        ([("H100", 0), ("A100", 0)], {("ok", "2 × A100 and H100")}),
        ([("H100", 0), ("H100", 7e10)], {("ok", "2 × H100"), ("warning", "GPUs 1: up to 70.0 GB in use")}),
        ([("H100", 0)], {("error", "1")}),
    ],
)
def test_gpus_are_as_many_as_ranks_and_free(gpus, found, monkeypatch):
    monkeypatch.setattr(machine, "count_gpus", lambda: len(gpus))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda place: place)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda place: gpus[place][0])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda place: SimpleNamespace(used=gpus[place][1]))
    assert {(one.level, one.found) for one in machine.gpus(Settings(ranks_here=2))} == found


def test_a_node_with_other_versions_is_an_error():
    fine = Finding("versions", "ok", "torch 2.13.0", node="n0")
    (error,) = other_versions([fine, replace(fine, node="n1"), replace(fine, node="n2", found="torch 2.12.1")])
    assert (error.level, error.node, error.expected) == ("error", "n2", "torch 2.13.0, as on n0")


def test_a_report_names_the_nodes_and_gives_the_rest_a_line():
    findings = [Finding("memory", "ok", f"{number} GB free", node=f"n{number}") for number in range(5)]
    findings += [Finding("memory", "error", "1 GB free", "9 GB", "free some", node="n7"), Finding("sum", "ok", "fast")]
    assert report(findings).splitlines() == [
        "ok       memory on 5 nodes (n0 … n4)",
        "error    memory on n7: 1 GB free; expected 9 GB; free some",
        "ok       sum: fast",
        "1 error would stop a run; 0 warnings",
    ]


def test_a_host_that_cannot_be_reached_is_named(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("127.0.0.1 slots=1\n")
    done = run_here("launch", "doctor", "--hostfile", hostfile, "--ssh", "-p 9 -o ConnectTimeout=5", "--json")
    (finding,) = json.loads(done.stdout)
    assert (done.returncode, finding["node"], finding["level"]) == (1, "127.0.0.1", "error")
    assert finding["found"].startswith("ssh ended with exit code 255: ssh: connect to host 127.0.0.1 port 9: ")
