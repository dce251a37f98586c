"""The supervisor with a launcher and ranks of a few lines of shell: real processes and signals, without PyTorch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.rank_processes import kept, with_own_gpus
from launch.supervise import supervise
from pretrain.run.stop_signals import STOP_SIGNALS

LAUNCHER = """
import json, os, subprocess, sys
words, *ranks = json.loads(sys.argv[1])
started = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank, command in enumerate(ranks)]
print(words, flush=True)
sys.exit(max([process.wait() for process in started]))
"""
STOPS_ON_REQUEST = """
until [ -e {run}/stop ]; do sleep 0.05; done
echo '{{"state": "stopped", "attempt": 1, "step": 3}}' > {run}/status.json
"""


def supervised(run: Path, *ranks: str, words: str = "") -> int:
    """The exit code of a supervised launcher that starts a shell script for each rank, prints `words` and waits."""
    commands = [kept(["sh", "-c", script]) for script in ranks]
    launcher = [sys.executable, "-S", "-c", LAUNCHER, json.dumps([words, *commands])]
    return supervise(launcher, dict(os.environ), run, len(ranks), dead_rank_seconds=3600)


TO_KEEPER, TO_LAUNCHER = "kill -TERM $PPID", "read -r _ _ _ parent _ < /proc/$PPID/stat; kill -TERM $parent"


@pytest.mark.parametrize("signalled", [TO_KEEPER, TO_LAUNCHER], ids=["keeper", "launcher"])
def test_sigterm_to_a_process_above_the_ranks_stops_the_run(tmp_path, capfd, signalled):
    """These processes block the signal, and never report it themselves."""
    assert supervised(tmp_path, f"{signalled}\n{STOPS_ON_REQUEST.format(run=tmp_path)}") == 75
    assert capfd.readouterr().err == "SIGTERM: sent to DeepSpeed's launcher; saving and stopping\n"


def test_signals_to_a_rank_that_starts_are_held_back(tmp_path):
    """Signals stay blocked until `catch` unblocks them. A shell above the rank would unblock them at once; dash
    does."""
    command = [sys.executable, "-c", "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))"]
    launcher = [sys.executable, "-S", "-c", LAUNCHER, json.dumps(["", kept(command)])]
    supervise(launcher, dict(os.environ), tmp_path, 1, dead_rank_seconds=3600)
    held_back = {int(number) for number in (tmp_path / "logs/attempt-0001/rank-00000.log").read_text().split()}
    assert held_back == set(STOP_SIGNALS)


def test_a_rank_that_fails_is_named_and_the_launchers_words_are_kept_off_the_terminal(tmp_path, capfd):
    """A line that quotes a report, as DeepSpeed's quotes the command that failed, is not a report."""
    words = "Killing subprocess\n['rank ended: 4 0 {code}'] exits with return code = 3"
    assert supervised(tmp_path, "exit 0", "echo last words; exit 3", words=words) == 1
    out, err = capfd.readouterr()
    logs = tmp_path / "logs/attempt-0001"
    assert (out, err) == ("", f"rank 1 ended with exit code 3; its log: {logs}/rank-00001.log\n  last words\n")
    assert (logs / "launcher.log").read_text() == f"{words}\n"
    assert (logs / "rank-00001.exit").read_text() == "3\n"


def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path, capfd):
    assert supervised(tmp_path, "exit 0", "kill -SEGV $$") == 1
    assert capfd.readouterr().err.startswith("rank 1 was killed by SIGSEGV; its log: ")
    assert (tmp_path / "logs/attempt-0001/rank-00001.exit").read_text() == "139\n"


def test_a_launcher_that_starts_no_rank_is_quoted(tmp_path, capfd):
    command = ["sh", "-c", "echo no hostfile; exit 1"]
    assert supervise(command, dict(os.environ), tmp_path, ranks=2, dead_rank_seconds=1) == 1
    logs = tmp_path / "logs/attempt-0001"
    assert capfd.readouterr().err == f"the launcher ended before its ranks; their logs: {logs}\n  no hostfile\n"


FULL_DISK = """
import sys
from pathlib import Path
from tests.launch.test_supervise import supervised
disk = Path(sys.argv[1])
sys.exit(supervised(disk / "run", f"head -c 2m /dev/zero > {disk}/filler; echo lost; exit 3"))
"""


def test_on_a_full_disk_it_is_the_disk_that_is_named_with_the_rank(tmp_path):
    """Neither the rank's log nor the file of its exit code has any content."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("a file system of one's own takes root or user namespaces")
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$0" -c "$2" "$1"'
    command = [*unshare, "bash", "-c", script, sys.executable, str(tmp_path), FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True)
    logs = tmp_path / "run/logs/attempt-0001"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"{logs}: No space left on device: the ranks' last output is missing from their logs; "
        "free some space, then run the same command again",
        f"rank 0 ended with exit code 3; its log: {logs}/rank-00000.log",
    ]


@pytest.mark.parametrize("chosen", ["2,3", "GPU-8932f937", "-1", "", None])
def test_ranks_see_the_gpus_that_the_user_chose(monkeypatch, chosen):
    """DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES=0,1,… for them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    command = with_own_gpus(["sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-unset}"])
    launchers = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run(command, env=launchers, capture_output=True, text=True)
    assert done.stdout == ("unset" if chosen is None else chosen) + "\n"
