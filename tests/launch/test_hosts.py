"""`launch hosts` on two hosts with addresses of their own, reached by ssh; one is cut off in the middle of a step."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.hosts import portable_environment, read, remote_command
from launch.multi_node import Node
from pretrain.faults import restarts
from pretrain.run import node_memory
from pretrain.run.metrics_file import read_metrics
from tests.in_process import run_here
from tests.launch import two_hosts
from tests.launch.conftest import a_run
from tests.launch.two_hosts import Hosts
from tests.pretrain.runs import losses, steps_taken

takes_hosts = pytest.mark.skipif(two_hosts.lacking() is not None, reason=str(two_hosts.lacking()))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


def command(hosts: Hosts, path: Path, *options: str) -> list[str]:
    hostfile = path.with_name("hostfile")
    hostfile.write_text("".join(f"{address} slots=1  # a host\n" for address in hosts.addresses))
    program = str(Path(sys.executable).with_name("launch"))
    return [program, "hosts", str(path), "--hostfile", str(hostfile), "--ssh", hosts.ssh, *options]


def steps_of(folder: Path, attempt: int) -> int:
    return sum(row.attempt == attempt and "train/loss" in row.metrics for row in read_metrics(folder / "run"))


@pytest.mark.slow
@takes_hosts
def test_a_host_that_is_cut_off_is_named_and_the_run_goes_on_to_the_same_losses_when_it_is_back(
    hosts, small_corpus, undisturbed, tmp_path, monkeypatch
):
    monkeypatch.setenv("RUN_UNDER_TEST", str(tmp_path))  # the hosts' processes get it too
    path = a_run(tmp_path, small_corpus)
    errors = tmp_path / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(command(hosts, path), stdout=subprocess.DEVNULL, stderr=stderr)
        while steps_of(tmp_path, 1) < 2:
            assert process.poll() is None, errors.read_text()
            time.sleep(0.1)
        hosts.cut_off(1)
        until = time.monotonic() + 120
        # the host's agent ends its ranks without the head
        while "trying again in 2 s" not in errors.read_text() or set(processes()) & set(hosts.busy(1)):
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < until, errors.read_text()
            time.sleep(0.1)
        hosts.connect(1)
        assert process.wait() == 0, errors.read_text()
    lost, again, *unreachable, training = errors.read_text().splitlines()
    assert lost == f"node {hosts.addresses[1]} is lost: no word from it for 30 s; ending the other ranks"
    assert again == "starting attempt 2 (faults.restarts)"
    for line, seconds in zip(unreachable, (1, 2, 4, 8, 16), strict=False):
        assert line.startswith(f"{hosts.addresses[1]}: ssh ended with exit code 255: ")
        assert line.endswith(f"; trying again in {seconds} s")
    assert training.startswith("training again, ")
    assert losses(path) == undisturbed
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert [(host["host"], host["ranks"]) for host in environment["hosts"]] == [
        (name, [rank]) for rank, name in enumerate(hosts.names)
    ]
    assert [file.read_text() for file in (tmp_path / "run/logs/attempt-0002").glob("*.exit")] == ["0\n"] * 2


@pytest.mark.slow
@takes_hosts
def test_a_run_over_a_slow_link_goes_on_by_itself_when_the_host_behind_it_is_lost(
    hosts, small_corpus, undisturbed, tmp_path
):
    """A link of 200 ms that loses 1 % makes a run slower and nothing else. Then the host's agent is killed, and its
    ranks die with it."""
    path = a_run(tmp_path, small_corpus)
    errors, saved = tmp_path / "stderr", tmp_path / "run/checkpoints/step-00000004"
    with errors.open("w") as stderr, hosts.slow(1, seconds=0.1, loss=0.01) as link:  # each way
        process = subprocess.Popen(command(hosts, path, "--min-nodes", "1"), stdout=subprocess.DEVNULL, stderr=stderr)
        while not saved.exists() or not link.lost:
            assert process.poll() is None, errors.read_text()
            time.sleep(0.1)
        assert losses(path) == {step: undisturbed[step] for step in losses(path)}
        (agent,) = filter(is_agent, hosts.processes(1))
        os.kill(agent, signal.SIGKILL)
        assert process.wait() == 0, errors.read_text()
    print(f"{link.lost} of {link.frames} frames lost")
    first, second = hosts.addresses
    lost, goes_on, again, training = errors.read_text().splitlines()
    assert lost.startswith(f"node {second} is lost: its connection ")
    assert goes_on == f"going on with 1 node ({first}), 1 rank"
    assert (again, training[:16]) == ("starting attempt 2 (faults.restarts)", "training again, ")
    # one rank adds gradients in another order than two: 6e-7 after 150 steps; other rows differ by percents
    assert losses(path) == {step: pytest.approx(loss, rel=1e-5) for step, loss in undisturbed.items()}


@pytest.mark.slow
@takes_hosts
def test_the_other_host_has_the_lost_hosts_part_of_the_state(hosts, small_corpus, undisturbed, tmp_path):
    """Nothing is on disk when the host is lost; its memory goes with it."""
    path, errors = a_run(tmp_path, small_corpus), tmp_path / "stderr"
    options = ["--min-nodes", "1", "checkpoint.every_steps=100", "checkpoint.memory_every_steps=1"]
    with errors.open("w") as stderr:
        process = subprocess.Popen(command(hosts, path, *options), stdout=subprocess.DEVNULL, stderr=stderr)
        while steps_of(tmp_path, 1) < 30:
            assert process.poll() is None, errors.read_text()
            time.sleep(0.05)
        (agent,) = filter(is_agent, hosts.processes(1))
        os.kill(agent, signal.SIGKILL)
        memory = node_memory.path(tmp_path / "run", hosts.names[1])
        assert memory
        shutil.rmtree(memory)
        assert process.wait() == 0, errors.read_text()
    first, second = restarts.read(tmp_path / "run")
    assert (first.checkpoint, first.killed, second.outcome) == (0, True, "finished")
    taken = steps_taken(tmp_path / "run")
    assert len(taken) - len(set(taken)) <= 4
    assert losses(path) == {step: pytest.approx(loss, rel=1e-5) for step, loss in undisturbed.items()}


def is_agent(process: int) -> bool:
    command = subprocess.run(["ps", "-o", "args=", "-p", str(process)], capture_output=True, text=True).stdout
    return command.split()[1:] == ["-P", "-m", "launch", "agent"]


def processes() -> list[int]:
    """Those of the run under test, wherever they are."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RUN_UNDER_TEST={os.environ['RUN_UNDER_TEST']}" in environment.read_text(errors="replace").split("\0"):
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@takes_hosts
def test_a_host_that_does_not_answer_is_named_before_anything_starts(hosts, small_corpus, tmp_path):
    path = a_run(tmp_path, small_corpus)
    hosts.cut_off(0)
    try:
        done = subprocess.run(
            [*command(hosts, path)[:-1], hosts.ssh + " -o ConnectTimeout=2"], capture_output=True, text=True
        )
    finally:
        hosts.connect(0)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {hosts.addresses[0]}: ssh ended with exit code 255: ssh: connect to host")
    assert not (tmp_path / "run/logs").exists()


def test_a_hostfile_has_deepspeeds_format(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nworker-1 slots=8\n\nuser@10.0.0.2   slots = 4 # half\n")
    assert read(path) == [Node("worker-1", 8), Node("user@10.0.0.2", 4)]


def test_every_line_of_a_hostfile_that_cannot_be_read_is_named(tmp_path, small_corpus):
    path = tmp_path / "hostfile"
    path.write_text("a slots=2\nb\na slots=1\n-oProxyCommand=x slots=1\n")
    done = run_here("launch", "hosts", a_run(tmp_path, small_corpus), "--hostfile", path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: --hostfile: {path}, line 2: expected `NAME slots=N`, found 'b'",
        f"--hostfile: {path}, line 3: a is listed in an earlier line",
        f"--hostfile: {path}, line 4: expected `NAME slots=N`, found '-oProxyCommand=x slots=1'",
    ]


def test_ranks_that_cannot_share_a_batch_and_a_missing_ssh_are_named(tmp_path, small_corpus, monkeypatch):
    path, hostfile = a_run(tmp_path, small_corpus), tmp_path / "hostfile"
    hostfile.write_text("localhost slots=3\n")
    done = run_here("launch", "hosts", path, "--hostfile", hostfile)
    assert done.returncode == 2
    assert "batch.global_batch_size: 16 rows can't be divided evenly among 3 ranks" in done.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_here("launch", "hosts", path, "--hostfile", hostfile)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["error: ssh is not on the PATH; `launch` starts agents on the hosts with it"],
    )


def test_the_remote_shell_sees_one_word_for_each(monkeypatch, tmp_path):
    """The environment goes through stdin, so only the place of the code is on the command line."""
    strange = f"{tmp_path}/a 'b' \"c\"; touch x; $(touch y)\n`touch z`"
    monkeypatch.setenv("PYTHONPATH", strange)
    shown = remote_command().replace("exec env", "exec printf '%s\\n'")
    done = subprocess.run(["sh", "-c", shown], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith(f"PYTHONPATH={strange}\n{sys.executable}\n-P\n-m\nlaunch\n")
    assert list(tmp_path.iterdir()) == []


def test_what_belongs_to_this_machine_is_not_handed_over(monkeypatch):
    """DeepSpeed's launcher would drop both, and all but five prefixes with them."""
    given = {"HF_TOKEN": "secret", "OMP_NUM_THREADS": "4", "HOME": "/home/me", "SLURM_JOB_ID": "3", "RANK": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    handed = portable_environment()
    assert {name: handed.get(name) for name in given} == {
        "HF_TOKEN": "secret",
        "OMP_NUM_THREADS": "4",
        "HOME": None,
        "SLURM_JOB_ID": None,
        "RANK": None,
    }
