"""Requests to stop a run, at each moment of its attempts: each ends the run with exit code 75, and none is lost."""

import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.processes import caught
from launch import attempts
from launch.attempt import Attempt
from launch.attempts import Attempts, Ended, Run
from launch.head import StopRequests
from launch.nodes import Access, Node
from launch.protocol import Connection, Event
from pretrain.config import RunConfig
from pretrain.run import restarts, status
from pretrain.training.tracking.mlflow_store import TrackedRun
from tests.launch.test_supervise import agent
from tests.support.runs import run_file
from tests.support.shell_ranks import ASKED, TIED
from tests.support.tables import each

NO_ROUTE = "echo No route to host; exit 255"
DISMISSED = "exec grep -q dismissed"  # ends, as ssh does, once the agent is to; it would else be killed after 5 s
ASKS = {
    "SIGTERM": f"kill -TERM {os.getpid()}",
    "SIGUSR1": f"kill -USR1 {os.getpid()}",
    "stop file": "mkdir -p {run}; touch {run}/stop",
}
STOPPED = """echo '{{"state": "stopped", "attempt": 1, "step": 3, "stop_file": true}}' > {run}/status.json; exit 75"""


@dataclass
class Supervised:
    """A run that is supervised in this process, whose ranks are lines of shell; `ends` says how.

    `hosts`: what stands for ssh, try by try; none: this machine. `wait`: seconds between two tries.
    """

    folder: Path
    hosts: list[list[str]] = field(default_factory=list)
    wait: float = 0.01

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def in_mlflow(self) -> str:
        tracked = TrackedRun.load(self.run)
        assert tracked
        return tracked.status

    def ends(self, rank: str = "exit 1") -> Ended:
        path = run_file(self.folder, self.folder / "corpus", tracking={"mlflow": None})
        self.run.mkdir()
        TrackedRun("experiment", "test", 1).save(self.run)
        access = Access(lambda host: self.hosts.pop(0), waits=[self.wait]) if self.hosts else Access()
        requests, config = StopRequests(self.run), load(path, [], RunConfig)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "rank", ["sh", "-c", rank.format(run=self.run)])
            with caught(requests.on_signal), Attempts(Run(path, []), config, [Node("a", 1)], access, requests) as made:
                return made.until_over()


@each("asks", ASKS)
def test_a_request_before_the_first_attempt_stops_the_run(tmp_path, capfd, asks):
    """The node is being reached."""
    one = Supervised(tmp_path)
    one.hosts = [["sh", "-c", f"{ASKS[asks].format(run=one.run)}; {DISMISSED}"]]
    assert one.ends() == Ended(75, asks == "SIGUSR1")
    assert attempts.NOTHING_STARTED in capfd.readouterr().err
    assert (status.read(one.run).state, (one.run / "logs").exists(), (one.run / "stop").exists()) == (
        "new",
        False,
        False,
    )


def test_a_warning_of_the_scheduler_while_a_run_is_checked_stops_the_run(tmp_path, monkeypatch, capfd):
    """It would otherwise end the supervisor, and SLURM wouldn't requeue the job."""
    one = Supervised(tmp_path)

    def checked(*_: object, **__: object) -> object:
        os.kill(os.getpid(), signal.SIGUSR1)
        return type("Setup", (), {"directory": one.run, "finished": False})

    monkeypatch.setattr(attempts, "preflight", checked)
    path = run_file(tmp_path, tmp_path / "corpus")
    assert attempts.launch(Run(path, []), [Node("a", 1)], Access()) == Ended(75, True)
    assert attempts.NOTHING_STARTED in capfd.readouterr().err


@each("asks", ASKS)
def test_a_request_in_an_attempt_stops_the_run(tmp_path, asks):
    one = Supervised(tmp_path)
    assert one.ends(f"{ASKS[asks]}; {ASKED}; {STOPPED}") == Ended(75, asks == "SIGUSR1")
    assert [attempt.outcome for attempt in restarts.read(one.run)] == ["stopped"]


def stopped_after_an_attempt(one: Supervised, said: str) -> None:
    """Asserts that the run has stopped on request without another attempt."""
    now = status.read(one.run)
    assert (now.state, now.attempt, one.in_mlflow, one.hosts) == ("stopped", 1, "KILLED", [])
    assert [attempt.outcome for attempt in restarts.read(one.run)] == ["failed"]
    assert not (one.run / "logs/attempt-0002").exists()
    assert not (one.run / "stop").exists()
    assert "stopped before attempt 2; the same command resumes the run from step 20\n" in said
    assert "nothing was saved" not in said


SAVED = "mkdir -p {run}/checkpoints/step-00000020"


@each("asks", ASKS)
def test_a_request_in_the_wait_before_another_attempt_stops_the_run(tmp_path, monkeypatch, capfd, asks):
    one = Supervised(tmp_path)

    def to_wait(failures: object) -> float:
        threading.Timer(0.2, os.system, [ASKS[asks].format(run=one.run)]).start()
        return 3600.0

    monkeypatch.setattr(restarts, "seconds_to_wait", to_wait)
    assert one.ends(f"{SAVED}; exit 1") == Ended(75, asks == "SIGUSR1")
    stopped_after_an_attempt(one, capfd.readouterr().err)


def test_agents_are_heard_in_the_wait_before_another_attempt(tmp_path, monkeypatch, capfd):
    """Each side would else count the other as lost."""
    one, waits, receive = Supervised(tmp_path, hosts=[agent()]), threading.Event(), Connection.receive

    def to_wait(failures: object) -> float:
        waits.set()
        return 5.0

    def received(connection: Connection) -> object:
        if waits.is_set():
            waits.clear()
            status.request_stop(one.run)
        return receive(connection)

    monkeypatch.setattr(restarts, "seconds_to_wait", to_wait)
    monkeypatch.setattr(Connection, "receive", received)
    assert one.ends(f"{SAVED}; exit 1") == Ended(75, False)
    stopped_after_an_attempt(one, capfd.readouterr().err)


@each("asks, ended", [("SIGUSR1", Ended(1, True)), ("SIGTERM", Ended(1, False))])
def test_a_node_that_is_lost_after_the_schedulers_warning_interrupts_the_run(tmp_path, asks, ended):
    """The job is then requeued, but not if the user has asked for the stop."""
    path, logs = run_file(tmp_path, tmp_path / "corpus"), tmp_path / "run/logs/attempt-0001"
    requests, nodes = StopRequests(tmp_path / "run"), [Node("a", 1), Node("b", 1)]
    logs.mkdir(parents=True)
    requests.on_signal(signal.Signals[asks])
    attempt = Attempt(logs, "ab", lost={"b": "srun ended with exit code 1: node failed"}, ended=1.0, read=1.0)
    assert Attempts(Run(path, []), load(path, [], RunConfig), nodes, Access(), requests).end_after(attempt) == ended


@each(
    "asks, error, ended, reason",
    [
        (["SIGUSR1"], "ValueError: on purpose", Ended(1, True), "it failed before it had stopped"),
        (["SIGUSR1"], "OSError: No space left on device", Ended(1, False), "it failed before it had stopped"),
        (["SIGINT"], "ValueError: on purpose", Ended(1, False), "it failed before it had stopped"),
        (["SIGUSR1", "SIGTERM"], "ValueError: on purpose", Ended(1, False), "it was killed before it had stopped"),
    ],
)
def test_a_rank_that_fails_after_the_schedulers_warning_interrupts_the_run(tmp_path, asks, error, ended, reason):
    """If another attempt would have followed without the warning. A second signal kills the run."""
    path, logs = run_file(tmp_path, tmp_path / "corpus"), tmp_path / "run/logs/attempt-0001"
    requests = StopRequests(tmp_path / "run")
    logs.mkdir(parents=True)
    for name in asks:
        requests.on_signal(signal.Signals[name])
    attempt = Attempt(logs, "ab", [Event("ended", 1, 1, [error])], ended=1.0, read=1.0)
    run, config, nodes = Run(path, []), load(path, [], RunConfig), [Node("a", 1), Node("b", 1)]
    assert Attempts(run, config, nodes, Access(), requests).end_after(attempt) == ended
    assert status.read(tmp_path / "run") == status.Status("failed", 1, 0, reason=reason)


LOSES_ITS_NODE = f"{SAVED}; {TIED}; kill -KILL $PPID; sleep 3600"


@each("moment", [NO_ROUTE, DISMISSED])
@each("asks", ASKS)
def test_a_request_while_a_lost_node_is_away_stops_the_run(tmp_path, monkeypatch, capfd, asks, moment):
    """The node doesn't answer, or it answers but its agent isn't connected yet."""
    monkeypatch.setattr(restarts, "seconds_to_wait", lambda failures: 0.0)
    one = Supervised(tmp_path, wait=3600.0)
    one.hosts = [agent(), ["sh", "-c", f"{ASKS[asks].format(run=one.run)}; {moment}"]]
    assert one.ends(LOSES_ITS_NODE) == Ended(75, asks == "SIGUSR1")
    stopped_after_an_attempt(one, capfd.readouterr().err)


def test_a_lost_node_that_stays_away_ends_the_run_as_failed(tmp_path, capfd):
    """A scheduler may requeue its job."""
    one = Supervised(tmp_path)
    one.hosts = [agent(), ["sh", "-c", NO_ROUTE], ["sh", "-c", NO_ROUTE]]
    assert one.ends(LOSES_ITS_NODE) == Ended(1, True)
    failed_after_an_attempt(one, capfd.readouterr().err, "a: sh ended with exit code 255: No route to host")


def test_a_node_that_comes_back_with_fewer_gpus_ends_the_run_as_failed(tmp_path, monkeypatch, capfd):
    checks = iter([None, UserError("a: 2 ranks, but it has 1 GPUs")])

    def check(*_: object) -> None:
        if error := next(checks):
            raise error

    monkeypatch.setattr(attempts, "_check", check)
    one = Supervised(tmp_path)
    one.hosts = [agent(), agent()]
    assert one.ends(LOSES_ITS_NODE) == Ended(1, True)
    failed_after_an_attempt(one, capfd.readouterr().err, "a: 2 ranks, but it has 1 GPUs")


REFUSED_AGAIN = """
if [ "${{PRETRAIN_SUPERVISED##*-}}" = 0001 ]; then
echo '{{"state": "running", "attempt": 1}}' > {run}/status.json
exit 1
fi
echo "error: run.yaml: no such file"; exit 2
"""


def test_a_run_that_is_refused_at_a_restart_has_failed(tmp_path, monkeypatch):
    """Else it would count as running for ever."""
    monkeypatch.setattr(restarts, "seconds_to_wait", lambda failures: 0.0)
    one = Supervised(tmp_path)
    assert one.ends(REFUSED_AGAIN) == Ended(2, False)
    assert (status.read(one.run), one.in_mlflow) == (status.Status("failed", 2, 0), "FAILED")


def failed_after_an_attempt(one: Supervised, said: str, reason: str) -> None:
    now = status.read(one.run)
    assert (now.state, now.attempt, now.reason, one.in_mlflow) == ("failed", 1, reason, "FAILED")
    assert f"no further attempt: {reason}\n" in said
