"""`launch hosts` on two hosts with addresses of their own, reached by ssh; one is cut off in the middle of a step."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from data_pipeline.base.errors import UserError
from launch.attempts import _check
from launch.hosts import access, portable_environment, read, remote_command, ssh_options
from launch.nodes import Agent, Node
from launch.protocol import Machine
from launch.tools.doctor.checks import Finding
from pretrain.run import status
from tests.conftest import run
from tests.launch.conftest import a_run, takes_fuse, takes_hosts
from tests.support.in_process import done_here, run_here
from tests.support.processes import processes_with
from tests.support.runs import losses
from tests.support.shared_files import UNPROTECTED, mounted, warnings_in
from tests.support.started import Started
from tests.support.steps import Planned
from tests.support.tables import each
from tests.support.two_hosts import Hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


def hosts_of(hosts: Hosts, path: Path) -> list[str]:
    hostfile = path.with_name("hostfile")
    hostfile.write_text("".join(f"{address} slots=1  # a host\n" for address in hosts.addresses))
    return ["--hostfile", str(hostfile), "--ssh", hosts.ssh]


@pytest.mark.slow
@takes_hosts
def test_a_host_that_is_cut_off_is_named_and_the_run_goes_on_to_the_same_losses_when_it_is_back(
    hosts, small_corpus, undisturbed, tmp_path
):
    path, held = a_run(tmp_path, small_corpus), tmp_path / "held"

    def left() -> set[int]:
        """What the run has on the host that is cut off."""
        return {one.pid for one in processes_with(RUN_UNDER_TEST=str(tmp_path))} & set(hosts.processes(1))

    command = ["launch", "hosts", path, *hosts_of(hosts, path)]
    with Started(tmp_path, *command, planned=(Planned(0, 6, "hold", str(held)),)) as run:
        run.until(held.exists)
        hosts.cut_off(1)
        try:
            # the host's agent ends its ranks without the head
            run.until(lambda: "trying again in 2 s" in run.stderr and not left())
        finally:
            hosts.connect(1)
        assert run.end() == 0, run.stderr
    lost, again, *unreachable = run.stderr.splitlines()
    assert lost == f"node {hosts.addresses[1]} is lost: no message from it for 30 s; ending the other ranks"
    assert again == "starting attempt 2 (faults.max_restarts)"
    for line, seconds in zip(unreachable, (1, 2, 4, 8, 16), strict=False):
        assert line.startswith(f"{hosts.addresses[1]}: ssh ended with exit code 255: ")
        assert line.endswith(f"; trying again in {seconds} s")
    assert losses(path) == undisturbed
    told = json.loads((tmp_path / "run/environment.json").read_text())
    assert [(host["host"], host["ranks"]) for host in told["hosts"]] == [
        (name, [rank]) for rank, name in enumerate(hosts.names)
    ]
    assert [file.read_text() for file in (tmp_path / "run/logs/attempt-0002").glob("*.exit")] == ["0\n"] * 2


@pytest.mark.slow
@takes_hosts
def test_hosts_are_checked_through_ssh(hosts, small_corpus, tmp_path):
    path = a_run(tmp_path, small_corpus)
    findings = [
        Finding(**one) for one in json.loads(done_here("launch", "doctor", path, *hosts_of(hosts, path), "--json"))
    ]
    levels = {one.node: one.level for one in findings if one.check == "run directory"}
    assert levels.keys() == set(hosts.addresses)
    assert "error" not in levels.values()
    assert next(one.found for one in findings if one.check == "all-reduce").startswith("2 ranks, ")


def test_a_hostfile_has_deepspeeds_format_and_every_wrong_line_is_named(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nworker-1 slots=8\n\nuser@10.0.0.2   slots = 4 # half\n")
    assert read(path) == [Node("worker-1", 8), Node("user@10.0.0.2", 4)]
    path.write_text("a slots=2\nb\na slots=1\n-oProxyCommand=x slots=1\nc slots=10000\n")
    with pytest.raises(UserError) as refused:
        read(path)
    assert str(refused.value).splitlines() == [
        f"--hostfile: {path}, line 2: expected `NAME slots=N`, found 'b'",
        f"--hostfile: {path}, line 3: a is listed in an earlier line",
        f"--hostfile: {path}, line 4: expected `NAME slots=N`, found '-oProxyCommand=x slots=1'",
        f"--hostfile: {path}, line 5: expected `NAME slots=N`, found 'c slots=10000'",
    ]


def test_ranks_that_cannot_share_a_batch_and_a_missing_ssh_are_named(tmp_path, small_corpus, monkeypatch):
    path, hostfile = a_run(tmp_path, small_corpus), tmp_path / "hostfile"
    hostfile.write_text("localhost slots=3\n")
    uneven = "error: batch.global_batch_size: 16 rows can't be divided evenly among 3 ranks"
    for said in (uneven, "error: ssh is not on the PATH; `launch` starts agents on the hosts with it"):
        done = run_here("launch", "hosts", path, "--hostfile", hostfile)
        assert (done.returncode, done.stderr[: len(said)]) == (2, said)
        monkeypatch.setenv("PATH", str(tmp_path))


def test_more_nodes_than_the_hostfile_has_are_refused(tmp_path, small_corpus):
    (hostfile := tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    done = run_here("launch", "hosts", a_run(tmp_path, small_corpus), "--hostfile", hostfile, "--min-nodes", "3")
    assert (done.returncode, done.stderr) == (2, f"error: --min-nodes: 3 is more than the 2 hosts of {hostfile}\n")


@each("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_first_host_that_only_it_can_reach_is_refused(address):
    """Where its name is in its /etc/hosts, ssh may have reached it there."""
    agents = [Agent("a", Mock()), Agent("b", Mock())]
    for agent, own in zip(agents, (address, "fe80::1%eth0"), strict=True):
        agent.machine = Machine(own, 1, 4711)
    with pytest.raises(UserError, match=f"^a: the other nodes can't find it at {address}; name its address$"):
        _check([Node("a", 1), Node("b", 1)], agents)


def test_options_of_ssh_that_no_shell_would_read_are_named(tmp_path, small_corpus):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=1\n")
    for command in ("hosts", "doctor"):
        done = run_here("launch", command, a_run(tmp_path, small_corpus), "--hostfile", hostfile, "--ssh", '-i "key')
        assert (done.returncode, done.stderr) == (2, 'error: --ssh: -i "key: no closing quotation\n')


@pytest.mark.skipif(not shutil.which("ssh"), reason="ssh isn't installed")
def test_options_of_ssh_go_before_those_of_launch():
    """`ssh -G` shows what ssh makes of its options, and connects to nothing."""
    given = ssh_options("-o ConnectTimeout=90 -o BatchMode=no")
    command_of = access(given).command
    assert command_of is not None
    program, *command = command_of("10.0.0.2")
    shown = subprocess.run([program, "-G", *command], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"connecttimeout 90", "batchmode no", "serveraliveinterval 15", "hostname 10.0.0.2"} <= {*shown}


def test_the_remote_shell_sees_one_word_for_each(monkeypatch, tmp_path):
    """The environment goes through stdin, so only the place of the code is on the command line."""
    strange = f"{tmp_path}/a 'b' \"c\"; touch x; $(touch y)\n`touch z`"
    monkeypatch.setenv("PYTHONPATH", strange)
    shown = remote_command().replace("exec env", "exec printf '%s\\n'")
    done = subprocess.run(["sh", "-c", shown], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith(f"PYTHONPATH={strange}\n{sys.executable}\n-P\n-m\nlaunch\n")
    assert list(tmp_path.iterdir()) == []


def test_what_belongs_to_this_machine_is_not_handed_over(monkeypatch):
    here = {"HOME": "/home/me", "SLURM_JOB_ID": "3", "SLURMD_NODENAME": "n1", "RANK": "0"}
    given = {"HF_TOKEN": "secret", "OMP_NUM_THREADS": "4"}
    for name, value in (here | given).items():
        monkeypatch.setenv(name, value)
    handed = portable_environment()
    assert {name: value for name, value in handed.items() if name in here | given} == given


# File systems as clusters have them. Hosts that see files late: `test_slurm_chain`


@pytest.mark.slow
@takes_fuse
def test_a_run_without_file_locks_warns_once_and_ends_well(small_corpus, tmp_path):
    with mounted(tmp_path, "no-locks") as mount:
        path = a_run(mount.mountpoint, small_corpus, steps=4)
        done = run("launch", "local", path, "--ranks", "2")
        assert done.returncode == 0, done.stderr
        directory = mount.mountpoint / "run"
        assert status.read(directory).state == "finished"
        assert warnings_in(done.stdout + done.stderr) == [
            f"warning: no file locks here (Function not implemented): {directory}: {UNPROTECTED}"
        ]


@takes_fuse
def test_the_mount_does_what_it_says(tmp_path):
    """Without this, tests on such mounts would show nothing."""
    with mounted(tmp_path, "no-locks cached") as mount:
        file, other = mount.mountpoint / "file", mount.mountpoint / "other"
        file.write_text("one")
        seen = (file.stat().st_size, other.exists())
        (mount.directory / "other").touch()
        (mount.directory / "file").write_text("longer")
        assert (file.stat().st_size, other.exists()) == seen == (3, False)
        assert sorted(path.name for path in mount.mountpoint.iterdir()) == ["file", "other"]
