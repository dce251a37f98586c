"""Each failure of the table in docs/how-to/when-a-run-fails.md, through `launch` and an agent.

In place of `pretrain train`, each rank runs a few lines of shell, which fail and tell it as a rank does.
"""

import os
import re
import sys
from pathlib import Path

import psutil
import pytest

import launch.cli
from launch.attempts import Run
from pretrain.run import rank_logs, restarts, status
from pretrain.training.tracking.mlflow_store import TrackedRun
from tests.support.processes import processes_with
from tests.support.runs import run_file
from tests.support.shell_ranks import ASKED, DONE, STOPPED, TIED, WAITS, told
from tests.support.tables import each

PAGE = Path(__file__).parents[2] / "docs/how-to/when-a-run-fails.md"
TABLE = PAGE.read_text().split("| failure |")[1].partition("\n\n")[0]
ROWS = [[cell.strip() for cell in row.split("|")[1:5]] for row in TABLE.splitlines()[2:]]
ATTEMPTS = {"yes": (1, 2), "once": (9, 2), "no": (9, 1)}  # how many of them fail, if asked to, and how many there are

SCRIPT = """
echo $GLOO_SOCKET_IFNAME $MASTER_ADDR $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_SIZE $CROSS_RANK $CROSS_SIZE \\
    >> {folder}/places
number=${{{logs}##*attempt-}}
if [ "$number" -le {failing} ]; then
case $RANK in
0) {first} ;;
1) {second} ;;
esac
else
[ $RANK != 0 ] || echo '{{"state": "finished", "step": 8, "attempt": 2}}' > {run}/status.json
{done}
fi
"""
HANGS = """
import os, sys, time
from pretrain.run import heartbeat, watchdog
stopped = lambda: open(f"/proc/{open(sys.argv[1]).read().strip()}/stat").read().rpartition(")")[2].split()[0] == "T"
with watchdog.watching(0, None, 3600):
    while not (os.path.exists(sys.argv[1]) and stopped()):
        time.sleep(0.05)
    watchdog.mark()
    heartbeat.tell(0, "hung")
    time.sleep(3600)
"""
# n1 and n2 are this machine; n3 can't be reached
SSH = """#!/bin/sh
for last; do :; done
case "$*" in
*" n3 "*) echo "ssh: connect to host n3 port 22: No route to host" >&2; exit 255 ;;
*) SSH_CONNECTION="127.0.0.1 50000 127.0.0.1 22" exec sh -c "$last" ;;
esac
"""


def fails(error: str) -> str:
    """A rank meets an error, which it tells and writes."""
    return f"echo '{error}'; {told('failed', error)}; exit 1"


# What ranks 0 and 1 do.
PLANTED = {
    "a rank is killed": (WAITS, "kill -KILL $$"),
    "a rank crashes": (WAITS, "kill -SEGV $$"),
    "a rank meets an error": (WAITS, fails("ValueError: on purpose")),
    "a library ends a rank": (WAITS, "exit 0"),
    "a rank hangs": (WAITS, f"{told('hung', '')}; {WAITS}"),
    "a rank is stopped": (
        "exec {python} {folder}/hangs/hangs.py {folder}/pid",
        "echo $$ > {folder}/new; mv {folder}/new {folder}/pid; kill -STOP $$",
    ),
    "a node computes wrong": (
        WAITS,
        f"{told('faulty', '1')}; {fails('step 40: rank 1 computes wrong; nothing was wrong at step 20')}",
    ),
    "the disk is full": (WAITS, fails("OSError: [Errno 28] No space left on device")),
    "a signal": (f"{ASKED}; {STOPPED}; {DONE}", f"kill -TERM {os.getpid()}; {ASKED}; {DONE}"),
    "two signals": (WAITS, f"kill -TERM {os.getpid()}; {ASKED}; kill -TERM {os.getpid()}; {WAITS}"),
    "a host is lost": (WAITS, f"{TIED}; kill -KILL $PPID; {WAITS}"),
    "a host is unreachable": (WAITS, WAITS),
    "a wrong run file": (WAITS, WAITS),
    "other files are there": (WAITS, WAITS),
    "another run is there": (WAITS, WAITS),
}
SECOND_HOST = {"a host is lost": "n2", "a host is unreachable": "n3"}
OVERRIDE = {"a wrong run file": "run.max_stepz=5"}


def test_the_table_has_each_failure_once():
    assert [row[0] for row in ROWS] == list(PLANTED)


@each("failure, line, another, code", ROWS)
def test_a_failure_says_what_the_page_says(small_corpus, tmp_path, monkeypatch, capfd, failure, line, another, code):
    path, run = run_file(tmp_path, small_corpus), tmp_path / "run"
    failing, attempts = ATTEMPTS[another]
    places = {"run": run, "folder": tmp_path, "python": sys.executable}
    first, second = (script.format(**places) for script in PLANTED[failure])
    planned = {"first": first, "second": second, "done": DONE, "failing": failing, "logs": rank_logs.SUPERVISED}
    script = SCRIPT.format(**planned, run=run, folder=tmp_path)
    for name, content in {"rank.sh": script, "hangs/hangs.py": HANGS, "ssh": SSH}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "ssh").chmod(0o755)
    where = ["local", "--ranks", "2"]
    if second_host := SECOND_HOST.get(failure):
        (tmp_path / "hostfile").write_text(f"n1 slots=1\n{second_host} slots=1\n")
        where = ["hosts", "--hostfile", str(tmp_path / "hostfile")]
    overrides = OVERRIDE.get(failure, "faults.dead_rank_seconds=1")
    command = ["launch", *where, str(path), overrides]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(Run, "rank", ["sh", str(tmp_path / "rank.sh")])
    monkeypatch.setattr(restarts, "seconds_to_wait", lambda failures: 0.0)
    monkeypatch.setenv("RUN_UNDER_TEST", str(tmp_path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    run.mkdir()
    TrackedRun("tests", "mine", 1).save(run)
    if failure != "other files are there":
        (run / status.LOCK).touch()
    holder = status.lock(run) if failure == "another run is there" else None
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        launch.cli.main()
    if holder:
        holder.close()
    said = capfd.readouterr().err
    expected = re.escape(line.strip("`")).replace("…", ".*").replace("RUN", re.escape(str(run)))
    assert re.fullmatch(expected, said.splitlines()[0]), said
    assert int(ended.value.code or 0) == int(code), said
    started = 0 if line.startswith("`error: ") else attempts
    assert len(list(run.glob("logs/attempt-*"))) == started, said
    assert said.count("starting attempt 2") == (attempts == 2), said
    if another == "once":
        failed = status.read(run)
        assert (failed.state, failed.attempt, said.rstrip().endswith(failed.reason)) == ("failed", 2, True)
        assert TrackedRun.load(run).status == "FAILED"
    psutil.wait_procs(left := processes_with(RUN_UNDER_TEST=str(tmp_path)), timeout=60)
    assert [process.cmdline() for process in left if process.is_running()] == []
    if started:
        # gloo takes connections from anybody, and by default at the address of the host's name
        places = ["lo 127.0.0.1 0 2 0 2 0 1", "lo 127.0.0.1 1 2 1 2 0 1"]
        of_hosts = ["127.0.0.1 0 2 0 1 0 2", "127.0.0.1 1 2 0 1 1 2"]
        found = {*(tmp_path / "places").read_text().splitlines()}
        assert found
        assert found <= {*(of_hosts if second_host else places)}
