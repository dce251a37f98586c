"""The supervisor with ranks of a few lines of shell: real processes and signals, without PyTorch."""

import errno
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from data_pipeline.base.atomic import write_json
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.processes import STOP_SIGNALS
from launch import attempts
from launch.agent import Ranks
from launch.attempt import Attempt, first_failed, record
from launch.attempts import Attempts, Ended, Run
from launch.head import StopRequests, result, wrapped
from launch.nodes import Access, Agent, AgentPool, Node, wait_for_ends
from launch.protocol import Event, Machine, Start
from launch.slurm_head import _run_before
from pretrain.config import RunConfig
from pretrain.run import heartbeat, rank_logs, restarts
from tests.support import shell_ranks
from tests.support.mounts import mounted
from tests.support.processes import runs
from tests.support.runs import run_file
from tests.support.shell_ranks import ASKED, DONE, STOPPED, WAITS, supervise, supervised, told
from tests.support.tables import each


@each(
    "line, lines",
    [
        ("step 20  loss 5.1\n", ["step 20  loss 5.1"]),
        (
            "step 20  input use on mine: 0.11 nats/token\n",
            ["step 20  input use on", "    mine: 0.11", "    nats/token"],
        ),
        ("  a path /a/b/c/d/e/f/g/h/i/j/k\n", ["  a path", "      /a/b/c/d/e/f/g/h/i/j/k"]),  # never cut
    ],
)
def test_a_long_line_is_wrapped_at_its_spaces(line, lines):
    assert wrapped(line, 21) == "\n".join(lines) + "\n"


def supervisor(run: Path, *ranks: str) -> list[str]:
    """A command that calls `supervised` in a process of its own."""
    return [sys.executable, "-m", shell_ranks.__name__, str(run), *ranks]


def test_a_run_whose_terminal_is_closed_stops(tmp_path):
    """Both the kernel and the shell signal the supervisor, which then can't print any more."""
    terminal, inside = pty.openpty()
    heeds_hang_ups = ["env", "--default-signal=HUP"]  # which would be ignored below `nohup`
    saves = f"echo training; {ASKED}; sleep 1; {STOPPED}"  # which a second signal must not end
    command = [*heeds_hang_ups, "setsid", "--ctty", *supervisor(tmp_path, saves)]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        shown = b""
        while b"training" not in shown:
            shown += screen.read(1000)
    while not (tmp_path / "stop").exists():  # as the kernel's signal asks for
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)  # the shell's
    assert process.wait() == 75


def test_no_process_outlives_a_killed_supervisor(tmp_path):
    """This includes a suspended rank and a worker that a rank has started."""
    starts_a_worker = f"sleep 3600 & touch {tmp_path}/ready; wait"
    process = subprocess.Popen(supervisor(tmp_path / "run", starts_a_worker, "kill -STOP $$"))
    tree = psutil.Process(process.pid)
    below: list[psutil.Process] = []
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    # two ranks, a worker; what touched the file may not be gone yet
    while len(below) != 3 or psutil.STATUS_STOPPED not in [one.status() for one in below]:
        time.sleep(0.05)
        below = tree.children(recursive=True)
    process.kill()
    process.wait()
    while any(runs(one.pid) for one in below):
        time.sleep(0.05)


def test_signals_to_a_rank_that_starts_are_held_back(tmp_path):
    """Signals stay blocked until `catch` unblocks them."""
    command = [sys.executable, "-c", "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))"]
    supervise(command, tmp_path, 1)
    blocked = {int(number) for number in (tmp_path / "logs/attempt-0001/rank-00000.log").read_text().split()}
    assert blocked == set(STOP_SIGNALS)


def once(file: str) -> str:
    """Waits for a file in the directory of logs, and until a file written then has a later time than that one."""
    return f"until [ -e ${rank_logs.SUPERVISED}/{file} ]; do sleep 0.05; done; sleep 0.05"


OVER = [once(f"rank-0000{rank}.exit") for rank in range(2)]  # waits for the end of a rank
REPORTED = f"touch ${rank_logs.SUPERVISED}/reported"


FAILED, FAULTY = told("failed", ""), told("faulty", "1")
ON_PURPOSE = f"echo ValueError: on purpose; {told('failed', 'ValueError: on purpose')}"
PAIR = "RuntimeError: [gloo/transport/tcp/pair.cc:538] "
CLOSED = told("failed", f"{PAIR}Connection closed by peer [10.0.0.2]:4711")
RESET = told("failed", f"{PAIR}Read error: Connection reset by peer")
LEFT = "rank 1 exited with code 0 before the run's end; its log: {log}\n  last words\n"
OWN = "rank 1 ended with exit code 1: ValueError: on purpose; its log: "
WRONG = f"echo rank 1 computes wrong; {FAULTY}; {FAILED}; exit 1"


@each(
    "first, second, said",
    [
        # the first that reports is named, though the other ends before it
        (
            f"{once('reported')}; {FAILED}; exit 1",
            f"{ON_PURPOSE}; {REPORTED}; {OVER[0]}; exit 1",
            OWN + "{log}\n  Value",
        ),
        # so is its error, though it aborts as it ends: threads of gloo that find their group gone do that
        (f"{OVER[1]}; exit 1", f"{ON_PURPOSE}; kill -ABRT $$", "rank 1 failed: ValueError: on purpose; its log: "),
        # every rank knows from the others whose arithmetic was wrong
        (WRONG, f"{OVER[0]}; {WRONG}", "rank 1 ended with exit code 1; its log: "),
        # one that has lost its connection to another may report and end earlier, and destructors may abort it
        (f"{CLOSED}; exit 1", f"{OVER[0]}; {ON_PURPOSE}; exit 1", OWN),
        (f"{CLOSED}; kill -ABRT $$", f"{OVER[0]}; {ON_PURPOSE}; exit 1", OWN),
        (f"{CLOSED}; exit 1", f"{OVER[0]}; exit 3", "rank 1 ended with exit code 3; its log: "),
        (
            f"{ON_PURPOSE}; {REPORTED}; {OVER[1]}; exit 1",
            f"{once('reported')}; exit 3",
            "rank 1 ended with exit code 3",
        ),
        (DONE, "kill -SEGV $$", "rank 1 was killed by SIGSEGV; its log: "),
        (DONE, "echo last words; exit 3", "rank 1 ended with exit code 3; its log: {log}\n  last words\n"),
        (DONE, "echo error: run.yaml is a folder; exit 1", "rank 1 ended with exit code 1: run.yaml is a folder; its"),
        # library code may call `_exit`; the others fail because they miss the rank, and may report it earlier
        (f"{OVER[1]}; exit 1", "echo last words; exit 0", LEFT),
        (f"{OVER[1]}; kill -ABRT $$", "echo last words; exit 0", LEFT),
        (f"{OVER[1]}; exit 0", "echo last words; exit 0", LEFT),
        (f"{RESET}; {REPORTED}; {OVER[1]}; exit 1", f"{once('reported')}; echo last words; exit 0", LEFT),
    ],
)
def test_the_rank_that_failed_is_named(tmp_path, capfd, first, second, said):
    capfd.readouterr()
    assert supervised(tmp_path, first, second) == 1
    log = tmp_path / "logs/attempt-0001/rank-00001.log"
    assert capfd.readouterr().err.startswith(said.format(log=log))
    if "SEGV" in second:
        assert log.with_suffix(".exit").read_text() == "139\n"  # as shells count


def test_a_run_that_one_rank_alone_refuses_says_why(tmp_path, capfd):
    """Only rank 0's log is on the terminal."""
    refuses = "echo 'error: run.yaml: no such file'; exit 2"
    assert supervised(tmp_path, WAITS, refuses, dead_rank_seconds=0.1) == 2
    log = tmp_path / "logs/attempt-0001/rank-00001.log"
    said = f"rank 1 ended with exit code 2: run.yaml: no such file; its log: {log}\n  error: run.yaml: no such file\n"
    assert capfd.readouterr().err == said


def test_a_refusal_of_all_ranks_is_shown_once(tmp_path, capfd):
    """Though another attempt would follow a failure: rank 0 refuses later than rank 1."""
    refuses = "echo 'error: run.yaml: no such file'; exit 2"
    assert supervised(tmp_path, f"{OVER[1]}; sleep 1; {refuses}", refuses, another_follows=True) == 2
    assert capfd.readouterr() == ("error: run.yaml: no such file\n", "")


def test_ranks_that_hang_since_another_failed_have_their_time_to_end(tmp_path, capfd):
    """It may wait for a tracker, or for ranks that wait for it."""
    started = time.monotonic()
    assert supervised(tmp_path, WAITS, f"echo last words; {FAILED}; {WAITS}", dead_rank_seconds=1) == 1
    assert time.monotonic() - started >= 1
    log = tmp_path / "logs/attempt-0001/rank-00001.log"
    assert capfd.readouterr().err == f"rank 1 failed; its log: {log}\n  last words\n"


def test_a_rank_that_stops_before_the_others_is_no_failure(tmp_path):
    """Though another attempt would follow one: rank 0 has more to write."""
    saves = f"{OVER[1]}; sleep 1; {STOPPED}; exit 75"
    assert supervised(tmp_path, saves, "exit 75", another_follows=True) == 75


def test_of_ranks_that_end_while_the_agent_is_busy_the_first_is_known(tmp_path):
    """Rank 1 is killed, then rank 0 aborts because of it; both have ended when the agent looks."""
    shown = f"echo $$ > {tmp_path}/new-$RANK; mv {tmp_path}/new-$RANK {tmp_path}/$RANK"
    first = (
        f"until [ -e {tmp_path}/1 ]; do sleep 0.02; done; while [ -e /proc/$(cat {tmp_path}/1) ]; do sleep 0.02; done"
    )
    command = ["sh", "-c", f"{shown}; [ $RANK = 0 ] || kill -KILL $$; {first}; kill -ABRT $$"]
    ranks = Ranks(Start(command, {}, ranks=range(2), logs=str(tmp_path)), os.environ)
    told: list[Event] = []
    try:
        while not (tmp_path / "0").exists() or runs(int((tmp_path / "0").read_text())):
            time.sleep(0.05)
        while len(told) < 2:
            told += ranks.events()
    finally:
        ranks.end()
    assert [(event.kind, event.number, event.code) for event in told] == [("ended", 1, -9), ("ended", 0, -6)]


def test_of_ranks_that_hang_the_one_that_the_others_wait_for_is_known_by_how_they_stood(tmp_path, monkeypatch):
    """Later, one that has told of it has ended, and is silent; one that hung in native code may have continued."""
    read = {rank: heartbeat.Heartbeat(9, 9, 5.0 * rank, 9.0) for rank in range(2)}
    monkeypatch.setattr(heartbeat, "read", lambda directory: dict(read))
    command = ["sh", "-c", f"[ $RANK = 1 ] || {{ {told('hung', '')}; }}; {WAITS}"]
    ranks = Ranks(Start(command, {}, ranks=range(2), logs=str(tmp_path)), os.environ)
    try:
        while not any(event.kind == "hung" for event in ranks.events()):
            time.sleep(0.05)
        read[0], read[1] = heartbeat.Heartbeat(9, 9, 60.0, 9.0), heartbeat.Heartbeat(9, 10, 0.1, 9.0)
    finally:
        heartbeats = ranks.end()
    attempt = Attempt(tmp_path, "aa", [Event("hung", 0)], heartbeats=heartbeats)
    assert first_failed(attempt) == 1


@each("removes, kind", [(f"rm -r ${heartbeat.DIRECTORY}", "ended"), ("true", "left")])
def test_a_rank_that_could_not_tell_that_it_is_done_has_not_left(tmp_path, removes, kind):
    """systemd's RemoveIPC removes a user's files in /dev/shm."""
    ranks = Ranks(Start(["sh", "-c", removes], {}, ranks=[0], logs=str(tmp_path)), os.environ)
    told: list[Event] = []
    try:
        while not told:
            told += ranks.events()
    finally:
        ranks.end()
    assert [(event.kind, event.code) for event in told] == [(kind, 0)]


def test_a_stopped_rank_is_not_waited_for(tmp_path):
    """It tells nothing and never ends; a rank that tells of an error ends soon, and has more to write."""
    for kind, known in {"hung": True, "failed": False}.items():
        attempt = Attempt(tmp_path, "aa", [Event(kind, 1)], ended=time.time() - 60)
        assert attempt.cause_is_known == known


ALL_STOP = """
import os, signal
from pretrain.run import watchdog
with watchdog.watching(int(os.environ["RANK"]), None, 3600):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_that_all_ranks_are_stopped_is_noticed(tmp_path, capfd):
    """None of them can say so."""
    command = [sys.executable, "-c", ALL_STOP]
    assert supervise(command, tmp_path, 2, dead_rank_seconds=0.1, hang_seconds=0.5) == 1
    assert " makes no progress, and its process is stopped (SIGSTOP)" in capfd.readouterr().err


def test_the_cause_of_a_failure_is_shown_before_what_rank_0_says_because_of_it(tmp_path):
    ranks = f"echo at work; {OVER[1]}; echo Traceback of a consequence; exit 1", f"{once('rank-00000.log')}; exit 3"
    done = subprocess.run(supervisor(tmp_path, *ranks), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line for line in done.stdout.splitlines() if line != "at work"]
    assert [line.split(";")[0] for line in lines] == ["rank 1 ended with exit code 3", "Traceback of a consequence"]


def test_a_rank_that_cannot_be_started_is_named_with_the_reason(tmp_path, capfd):
    assert supervise([f"{tmp_path}/python"], tmp_path, ranks=1) == 1
    log, missing = tmp_path / "logs/attempt-0001/rank-00000.log", f"{tmp_path}/python: No such file or directory"
    assert capfd.readouterr().err == f"rank 0 ended with exit code 127: {missing}; its log: {log}\n"


def test_on_a_full_disk_it_is_the_disk_that_is_named_with_the_rank(tmp_path):
    """Neither the rank's log nor the file of its exit code has any content."""
    disk = tmp_path / "disk"
    fills = f"head -c 2m /dev/zero > {disk}/filler; echo lost; exit 3"
    done = mounted(disk, "size=1m", supervisor(disk / "run", fills), tmp_path / "errors")
    logs = disk / "run/logs/attempt-0001"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"{logs}: No space left on device: the ranks' last output is missing from their logs; "
        "free some space, then run the same command again",
        f"rank 0 ended with exit code 3; its log: {logs}/rank-00000.log",
    ]


def test_a_disk_that_is_full_for_a_while_is_reported_once(tmp_path):
    """The rank keeps the disk full until the supervisor warns, and then stops."""
    disk, errors = tmp_path / "disk", tmp_path / "errors"
    fills = f"head -c 2m /dev/zero > {disk}/filler; until [ -s {errors} ]; do sleep 0.05; done; rm {disk}/filler"
    done = mounted(disk, "size=1m", supervisor(disk / "run", f"{fills}; {STOPPED}"), errors)
    full = "No space left on device; the run continues, but its logs are incomplete"
    assert (done.returncode, done.stderr) == (75, f"warning: {disk}/run/logs/attempt-0001: {full}\n")


@each(
    "codes, step, expected",
    [
        *(({1: 75, 0: 75}, 9, 75), ({0: 0, 1: 0}, 9, 0), ({0: 0}, 9, 1), ({0: 75, 1: 1}, 9, 1), ({}, 9, 1)),
        *(({0: 2}, 0, 2), ({0: 2}, 7, 1)),  # a refusal, and an error after the first step
    ],
)
def test_exit_codes_say_how_a_run_ended_where_its_status_is_seen_late(tmp_path, codes, step, expected):
    """The status is still that of the attempt before, as another host may see it on a network file system."""
    write_json(tmp_path / "status.json", {"state": "running", "attempt": 1})
    logs = tmp_path / "logs/attempt-0002"
    logs.mkdir(parents=True)
    attempt = Attempt(logs, "aa", [Event("ended", rank, code) for rank, code in codes.items()])
    attempt.heartbeats = {0: heartbeat.Heartbeat(step, 0, 0.0, None)}
    assert result(attempt, tmp_path, StopRequests(tmp_path)) == expected


@each("name, interrupted", [("USR1", True), ("TERM", False)])
def test_a_stop_before_the_ranks_start_leaves_nothing_to_save(small_corpus, tmp_path, capfd, name, interrupted):
    """Exit code 75: a scheduler may start the run again. The agents never connect, or a job copies corpora first."""
    signalled = ["sh", "-c", f"kill -{name} {os.getpid()}; exec sleep 3600"]
    nothing = "stopped before this attempt started any rank; run the same command to continue"
    capfd.readouterr()
    assert _run_before(signalled) == Ended(75, interrupted)
    assert nothing in capfd.readouterr().err
    path = run_file(tmp_path, small_corpus)
    assert attempts.launch(Run(path, []), [Node("host", 1)], Access(lambda host: signalled)) == Ended(75, interrupted)
    assert nothing in capfd.readouterr().err
    assert not (tmp_path / "run/logs").exists()


@each("stop, interrupted", [(None, True), (11, True), (10, False), (4, False)])
def test_a_job_whose_run_is_where_it_was_to_stop_is_not_requeued(tmp_path, stop, interrupted):
    """The ranks have stopped after step 10: for `--stop-at-step`, or before it since their hours were over."""
    path = run_file(tmp_path, tmp_path / "corpus")
    requests, run = StopRequests(tmp_path / "run"), Run(path, [], stop)
    attempts = Attempts(run, load(path, [], RunConfig), [Node("a", 1)], Access(agent), requests)
    logs = tmp_path / "run/logs/attempt-0001"
    logs.mkdir(parents=True)
    write_json(tmp_path / "run/status.json", {"state": "stopped", "attempt": 1, "step": 10})
    assert attempts.end_after(Attempt(logs, "a")) == Ended(75, interrupted)


def agent(*before: str) -> list[str]:
    """What stands for ssh: it runs lines of shell, then an agent."""
    runs = f"exec {sys.executable} -P -m launch agent"
    return ["env", "SSH_CONNECTION=127.0.0.1 50000 127.0.0.1 22", "sh", "-c", "; ".join([*before, runs])]


def test_an_agent_is_understood_whatever_its_login_prints(monkeypatch):
    monkeypatch.setenv("SECRET", "of the head's user")
    with AgentPool(["a", "b"], Access(lambda _: agent("echo Welcome", "printf Unended"), {"SECRET": "secret"})) as pool:
        pool.connect(give_up=lambda: pool.problems)
        assert pool.problems == {}
        for one in pool.agents:
            assert list(one.connection.other_lines) == ["Welcome", "Unended"]
            assert (one.machine.address, one.machine.port > 0) == ("127.0.0.1", True)
            one.start(Start(["sh", "-c", "echo $SECRET; exit 3"], {}, number=5))
        for one in pool.agents:
            told: list[Event] = []
            while not told:
                told += one.events()
            assert told == [Event("program ended", 5, 3, ["secret"])]


SLOW = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from launch import agent, protocol
passed, folder, end = 0.0, Path(sys.argv[1]), agent.NodeProcesses.end
def slow_end(self):
    global passed
    passed += 100.0
    (folder / "ending").touch()
    while not (folder / "heard").exists():
        time.sleep(0.02)
    return end(self)
agent.NodeProcesses.end = slow_end
protocol.time = SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
sys.exit(agent.agent())
"""


def test_an_agent_whose_ranks_end_slowly_still_has_its_head(tmp_path, monkeypatch):
    """The head's heartbeats have arrived meanwhile."""
    monkeypatch.setattr("launch.protocol.HEARTBEAT_SECONDS", 0.0)
    slow = Access(lambda _: [sys.executable, "-P", "-c", SLOW, str(tmp_path)], head="127.0.0.1")
    with AgentPool(["a"], slow) as pool:
        pool.connect(give_up=lambda: pool.problems)
        (one,) = pool.agents
        one.end()
        while not (tmp_path / "ending").exists():
            time.sleep(0.02)
        one.poll()
        (tmp_path / "heard").touch()
        wait_for_ends([one])
        one.start(Start(["true"], {}, number=5))
        told: list[Event] = []
        while not (told or one.lost):
            told += one.events()
        assert (told, one.lost) == ([Event("program ended", 5, lines=[])], None)


def test_a_node_has_more_time_while_it_ends_its_ranks_and_the_other_nodes_are_heard_meanwhile():
    """The first node answers after the second has been polled."""
    answer = {"machine": vars(Machine("10.0.0.2", 8, 4711)), "heartbeats": {}}
    heard: list[str] = []

    def made(name: str, answers: bool) -> Agent:
        def receive() -> list[dict[str, Any]]:
            heard.append(name)
            return [answer] if answers or "b" in heard else []

        one = Agent(name, SimpleNamespace(silent=0.0, send=Mock(), receive=receive))  # type: ignore[arg-type]
        one.machine = Machine("10.0.0.2", 8, 4711)
        return one

    agents = first, _ = made("a", False), made("b", True)
    for one in agents:
        one.end()
    lost = []
    for seconds in (45.0, 95.0):
        first.connection.silent = seconds  # type: ignore[misc]
        lost.append(first.lost)
    assert lost == [None, "no message from it for 90 s"]
    first.connection.silent = 0.0  # type: ignore[misc]
    heard.clear()
    wait_for_ends(agents)
    assert [one.ends for one in agents] == [False, False]


def test_a_node_that_does_not_see_the_run_directory_says_so(tmp_path, monkeypatch):
    """It answers while it waits for it: else it would count as lost."""
    with AgentPool(["here"], Access()) as pool:
        (here,) = pool.agents
        here.start(Start([], {}, ranks=[0], logs=str(tmp_path / "attempt-0001")))
        assert here.events() == []
        monkeypatch.setattr("launch.agent._SECONDS_TO_SEE_THE_LOGS", 0.0)
        (refused,) = here.events()
        assert (refused.kind, "it must be on a file system of all nodes" in refused.lines[0]) == ("refused", True)


# What follows an attempt


@each(
    "found, min_nodes, last, left, said",
    [
        ("bb", 1, None, "ac", "continuing on 2 nodes (a, c), 2 ranks"),
        ("ba", 1, None, "abc", "starting attempt 3"),
        ("bb", None, Ended(1, False), "abc", "the arithmetic of b was wrong twice. Remove the node"),
    ],
)
def test_a_node_whose_arithmetic_was_wrong_twice_is_left_out_if_the_run_may_go_on(
    tmp_path, capsys, monkeypatch, found, min_nodes, last, left, said
):
    """Of nodes a, b and c, each with a rank. Each attempt finds the arithmetic of one of them wrong."""
    monkeypatch.setattr(restarts, "seconds_to_wait", lambda failures: 0.0)
    path = run_file(tmp_path, tmp_path / "corpus", batch={"global_batch_size": 12, "micro_batch_size": 2})
    config, run = load(path, [], RunConfig), Run(path, [], min_nodes=min_nodes)
    requests = StopRequests(tmp_path / "run")
    attempts = Attempts(run, config, [Node(name, 1) for name in "abc"], Access(agent, waits=(0.1, 0.2)), requests)
    attempts._pool = Mock()  # of agents that are sent away
    ends = []
    for number, node in enumerate(found, 1):
        logs = tmp_path / f"run/logs/attempt-{number:04d}"
        logs.mkdir(parents=True)
        rank, now = "abc".index(node), 100.0 * number
        attempt = Attempt(logs, "abc", began=now, ended=now + 9, read=now + 9)
        attempt.heartbeats = {0: heartbeat.Heartbeat(10 * number, 0, 0.0, 5.0)}
        attempt.reported = [Event("failed", 0), Event("failed", 1), Event("failed", 2)]
        words = (f"step {10 * number}: rank {rank} computes wrong",)
        attempt.reported += [Event("faulty", rank), *(Event("ended", one, 1, words) for one in range(3))]
        ends.append(attempts.end_after(attempt))
    assert (ends, "".join(node.name for node in attempts.nodes)) == ([None, last], left)
    assert said in capsys.readouterr().err
    ranks = [(one.rank, one.faulty_node) for one in restarts.read(tmp_path / "run")]
    assert ranks == [("abc".index(node), node) for node in found]


@each("min_nodes, last", [(None, Ended(1, False)), (1, None)])
def test_a_node_that_is_lost_again_and_again_counts_as_a_failure_unless_it_is_left_out(
    tmp_path, capsys, monkeypatch, min_nodes, last
):
    """In the fourth attempt within an hour. With `min_nodes` each attempt has one node fewer."""
    monkeypatch.setattr(restarts, "seconds_to_wait", lambda failures: 0.0)
    path = run_file(tmp_path, tmp_path / "corpus", batch={"global_batch_size": 60}, faults={"max_restarts": 3})
    config, run, nodes = load(path, [], RunConfig), Run(path, [], min_nodes=min_nodes), list("abcde")
    attempts = Attempts(
        run,
        config,
        [Node(name, 1) for name in nodes],
        Access(agent, waits=(0.1, 0.2)),
        Mock(signals=[], stop_signal=None, made=False),
    )
    ends = []
    for number in range(1, 5):
        logs = tmp_path / f"run/logs/attempt-{number:04d}"
        logs.mkdir(parents=True)
        attempt = Attempt(logs, [node.name for node in attempts.nodes], began=100.0 * number, ended=100.0 * number + 9)
        attempt.heartbeats = {0: heartbeat.Heartbeat(10 * number, 0, 0.0, 5.0)}
        attempt.lost = {attempts.nodes[-1].name: "ssh ended with exit code 255: it said nothing"}
        ends.append(attempts.end_after(attempt))
    assert ends == [None, None, None, last]
    assert len(attempts.nodes) == (5 if min_nodes is None else 1)
    said = "3 restarts within an hour are the limit (faults.max_restarts)"
    assert (said in capsys.readouterr().err) == (min_nodes is None)


def test_a_full_disk_is_recorded_as_one(tmp_path, monkeypatch):
    logs = tmp_path / "logs/attempt-0001"
    logs.mkdir(parents=True)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):  # a quota is like a full disk
        monkeypatch.setattr("pretrain.run.rank_logs.refusal", lambda logs, number=number: os.strerror(number))
        recorded = record(Attempt(logs, "ab", [Event("ended", 0, 1)]), 1, tmp_path)
        assert "the disk refuses to be written" in (restarts.refusal([recorded], 3) or "")


def test_a_lost_node_that_is_not_back_yet_is_tried_again(tmp_path, capsys):
    """The first time it can't be reached, a run ends: its name may be wrong."""
    path = run_file(tmp_path, tmp_path / "corpus")
    config, run, left = load(path, [], RunConfig), Run(path, []), ["works", "fails", "fails", "works", *["fails"] * 4]

    def ssh(host: str) -> list[str]:
        return agent() if left.pop(0) == "works" else ["sh", "-c", "echo No route to host; exit 255"]

    nodes, access, requests = [Node("a", 1)], Access(ssh, waits=(0.1, 0.2)), StopRequests(Path(config.run.directory))
    with Attempts(run, config, nodes, access, requests) as attempts:
        assert attempts.ready()
        assert attempts.leave_out(["a"])
        assert attempts.ready()
        said = "a: sh ended with exit code 255: No route to host"
        assert capsys.readouterr().err == f"{said}; trying again in 0.1 s\n{said}; trying again in 0.2 s\n"
        assert attempts.leave_out(["a"])
        with pytest.raises(FailedError, match="No route to host"):
            attempts.ready()
    with Attempts(run, config, nodes, access, requests) as again, pytest.raises(FailedError, match="No route to host"):
        again.ready()
    assert left == []


def test_a_run_on_gpus_does_not_continue_on_the_cpu(tmp_path, monkeypatch):
    """The lost node is back, but its driver shows no GPU."""
    gpus, path = iter([2, 0]), run_file(tmp_path, tmp_path / "corpus")

    def pool(*_: object) -> Mock:
        (reached := Agent("a", Mock())).machine = Machine("10.0.0.1", next(gpus), 4711)
        return Mock(agents=[reached], problems={})

    monkeypatch.setattr(attempts, "AgentPool", pool)
    requests, access = StopRequests(tmp_path / "run"), Access(agent, waits=(0.1,))
    made = Attempts(Run(path, []), load(path, [], RunConfig), [Node("a", 2)], access, requests)
    assert made.ready()
    assert made.leave_out(["a"])
    with pytest.raises(UserError, match=r"^a: 2 ranks, but it has 0 GPUs$"):
        made.ready()
