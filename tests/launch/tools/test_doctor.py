"""`launch doctor` on a healthy machine and on broken ones, which are broken for real."""

import errno
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from launch.tools.doctor import checks
from launch.tools.doctor.checks import REPORT, Finding, Settings
from launch.tools.doctor.doctor import other_versions, report
from tests.support.in_process import run_here
from tests.support.mounts import mounted
from tests.support.runs import run_file as write_run_file
from tests.support.tables import each


@pytest.mark.slow
def test_a_healthy_machine_has_no_errors_and_is_as_it_was(small_corpus, tmp_path):
    path = write_run_file(tmp_path, small_corpus)
    before = sorted(tmp_path.iterdir())
    done = run_here("launch", "doctor", path, "--ranks", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [Finding(**one) for one in json.loads(done.stdout)]
    assert {finding.check for finding in findings} >= {
        *("versions", "GPUs", "shared memory", "run directory", "run file", "all-reduce"),
    }
    (sum_over_ranks,) = (finding for finding in findings if finding.check == "all-reduce")
    assert sum_over_ranks.found.startswith("2 ranks, ")
    assert sorted(tmp_path.iterdir()) == before


def test_a_broken_machine_gets_a_line_for_each_error(tmp_path):
    """A shared memory of 1 MiB and a missing corpus."""
    path = write_run_file(tmp_path, tmp_path / "nothing")
    doctor = [str(Path(sys.executable).with_name("launch")), "doctor", str(path)]
    done = mounted(Path("/dev/shm"), "size=1m", doctor, tmp_path / "errors")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    errors = [line.removeprefix("error    ").partition(";")[0] for line in lines if line.startswith("error")]
    assert errors[0].startswith("shared memory: 1.0 MB free in /dev/shm")
    assert errors[1].startswith("run file:")
    assert lines[-1].startswith("2 errors would stop a run")


@each(
    "options, reason",
    [
        ("size=1m", "can't write a file: No space left on device"),
        ("ro", "can't make a folder: Read-only file system"),
    ],
)
def test_a_run_directory_that_cannot_be_written_is_an_error(tmp_path, options, reason):
    code = (
        "import sys; from launch.tools.doctor import checks\n"
        "(finding,) = checks.run_directory(checks.Settings(directory=f'{sys.argv[1]}/a/run'))\n"
        "print(finding.level, finding.found)"
    )
    done = mounted(
        tmp_path / "disk", options, [sys.executable, "-c", code, str(tmp_path / "disk")], tmp_path / "errors"
    )
    assert done.stdout == f"error {tmp_path}/disk: {reason}\n", done.stderr


@each("method, mode, operation", [("open", "ab", "append to a file"), ("rename", None, "rename a folder")])
def test_a_mounted_bucket_that_refuses_what_runs_do_is_an_error(tmp_path, monkeypatch, method, mode, operation):
    works = getattr(Path, method)

    def refuses(path, *given):
        if mode in (None, *given):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return works(path, *given)

    monkeypatch.setattr(Path, method, refuses)
    (finding,) = checks.run_directory(Settings(directory=str(tmp_path / "run")))
    assert (finding.level, finding.found) == ("error", f"{tmp_path}: can't {operation}: Operation not permitted")
    assert "not in a mounted bucket" in finding.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_head_must_be_seen_on_each_node(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_SECONDS_TO_SEE", 0)
    (shared := tmp_path / "shared").touch()
    given = Settings(directory=str(tmp_path / "run"), shared=str(shared))
    (seen,) = checks.run_directory(given)
    assert seen.level == "ok"
    assert seen.found.startswith(f"{tmp_path}: ")
    (gone,) = checks.run_directory(replace(given, shared=str(tmp_path / "gone")))
    assert (gone.level, gone.expected) == ("error", "one file system for all nodes")
    assert list(tmp_path.iterdir()) == [shared]


def test_a_check_that_hangs_or_fails_is_named_and_the_others_run(monkeypatch, capsys):
    def failing(_: Settings) -> list[Finding]:
        raise OSError("no driver")

    of_node = {
        "hanging": lambda _: time.sleep(600),
        "failing": failing,
        "fine": lambda given: [Finding("fine", "ok", f"{given.ranks_here} ranks")],
    }
    monkeypatch.setattr(checks, "CHECKS", {"node": of_node})
    monkeypatch.setattr(checks, "SECONDS", {"node": 1})
    monkeypatch.setenv(checks.REQUEST, json.dumps(["node", {"ranks_here": 2}]))
    before = signal.getsignal(signal.SIGALRM)
    try:
        checks.main()
    finally:
        signal.signal(signal.SIGALRM, before)
    found = json.loads(capsys.readouterr().out.removeprefix(REPORT))
    assert [(one["check"], one["level"], one["found"]) for one in found] == [
        ("hanging", "error", "the check failed: no answer within 1 s"),
        ("failing", "error", "the check failed: no driver"),
        ("fine", "ok", "2 ranks"),
    ]


def test_bandwidth_is_that_of_a_ring():
    """In a ring each of 4 ranks sends 2·3/4 of the bytes."""
    assert checks.speed(4, 10**9, 0.5, "NVIDIA H100").found == "4 ranks, 954 MiB at 3 GB/s (NVIDIA H100)"
    assert checks.speed(1, 10**9, 0.5, "CPU, gloo").found == "one rank (CPU, gloo), so nothing is exchanged"


@each(
    "gpus, chosen, found",
    [
        ([("H100", 0), ("H100", 1e9)], None, {("ok", "2 × H100")}),
        ([("H100", 0), ("A100", 0)], None, {("ok", "2 × A100 and H100")}),
        ([("H100", 0), ("H100", 7e10)], None, {("ok", "2 × H100"), ("warning", "GPUs 1: up to 70.0 GB in use")}),
        ([("H100", 0)], None, {("error", "1")}),
        ([("A100", 7e10), ("H100", 0), ("H100", 0)], "2, 1", {("ok", "2 × H100")}),
        ([("A100", 7e10), ("H100", 0), ("H100", 0)], "GPU-2f,GPU-1f", {("ok", "2 × H100")}),
        (
            [("A100", 7e10), ("H100", 0), ("H100", 7e10)],
            "1,2",
            {("ok", "2 × H100"), ("warning", "GPUs 2: up to 70.0 GB in use")},
        ),
    ],
)
def test_gpus_are_as_many_as_ranks_and_free(gpus, chosen, found, monkeypatch):
    """GPUs that CUDA_VISIBLE_DEVICES leaves out don't count, whatever uses them. The start of a UUID names a GPU."""
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    monkeypatch.setattr(checks, "count_gpus", lambda: len(chosen.split(",") if chosen else gpus))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda place: place)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda place: f"GPU-{place}f932f93-d72c-4106-c12f-20bd9faed9f6")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda place: gpus[place][0])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda place: SimpleNamespace(used=gpus[place][1]))
    assert {(one.level, one.found) for one in checks.gpus(Settings(ranks_here=2))} == found


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
