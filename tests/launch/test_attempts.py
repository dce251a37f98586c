"""What follows an attempt, as the supervisor decides it."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import FailedError
from launch.agent_pool import AgentPool
from launch.attempt import Attempt, record
from launch.attempts import Ended, _Attempts
from launch.head import StopRequests
from launch.nodes import Access, Node, Nodes, Run
from launch.protocol import Event
from pretrain.config import RunConfig
from pretrain.run import restarts
from pretrain.run.heartbeat import Heartbeat
from pretrain.run.status import Status
from tests.pretrain.runs import run_file
from tests.tables import each


class Pool:
    """Agents that are sent away."""

    def close(self, run_goes_on: bool) -> None:
        assert run_goes_on


def after_findings(folder: Path, found: Sequence[str], min_nodes: int | None) -> tuple[list[Ended | None], list[Node]]:
    """How the run has ended after each attempt, of which each has found the arithmetic of one of its nodes wrong, and
    the nodes that are left of a, b and c, each with a rank."""
    path = run_file(folder, folder / "corpus", batch={"global_batch_size": 12, "micro_batch_size": 2})
    config, run = load(path, [], RunConfig), Run(path, [], min_nodes=min_nodes)
    nodes, directory = [Node(name, 1) for name in "abc"], Path(config.run.directory)
    requests = StopRequests(directory)
    access = Access(lambda pool, chosen: None, False, "", lambda agent: ("", 0), tries_again=True)
    ranks = Nodes(run, config, nodes, access, requests)
    ranks._pool = Pool()  # type: ignore[assignment]
    attempts = _Attempts(ranks, run, config, requests)
    ends = []
    for number, node in enumerate(found, 1):
        logs = directory / f"logs/attempt-{number:04d}"
        logs.mkdir(parents=True)
        rank = "abc".index(node)
        now = 100.0 * number
        attempt = Attempt(Status("running", number), logs, "abc", began=now, ended=now + 9, read=now + 9)
        attempt.heartbeats = {0: Heartbeat(10 * number, 0, 0.0, 0.0, 5.0)}
        attempt.told = [Event("rank failed", 0), Event("rank failed", 1), Event("rank failed", 2)]
        words = (f"step {10 * number}: rank {rank} computes wrong",)
        attempt.told += [Event("rank faulty", rank), *(Event("rank ended", one, 1, words) for one in range(3))]
        ends.append(attempts.end_after(attempt))
    return ends, ranks._nodes


@pytest.fixture(autouse=True)
def _at_once(monkeypatch) -> None:
    monkeypatch.setattr("launch.attempts.restarts.seconds_to_wait", lambda failures: 0.0)


@each(
    "found, min_nodes, last, left, said",
    [
        ("bb", 1, None, "ac", "going on with 2 nodes (a, c), 2 ranks"),
        ("ba", 1, None, "abc", "starting attempt 3"),
        ("bb", None, Ended(1, False), "abc", "the arithmetic of b was found wrong twice. Take the node away"),
    ],
)
def test_a_node_whose_arithmetic_was_wrong_twice_is_left_out_if_the_run_may_go_on(
    tmp_path, capsys, found, min_nodes, last, left, said
):
    ends, nodes = after_findings(tmp_path, found, min_nodes)
    assert (ends, "".join(node.name for node in nodes)) == ([None, last], left)
    assert said in capsys.readouterr().err
    ranks = [(one.rank, one.faulty_node) for one in restarts.read(tmp_path / "run")]
    assert ranks == [("abc".index(node), node) for node in found]


def test_a_killed_launcher_and_a_full_disk_are_recorded_as_what_they_are(tmp_path, monkeypatch):
    logs = tmp_path / "logs/attempt-0001"
    logs.mkdir(parents=True)
    attempt = Attempt(Status(), logs, "ab", [Event("launcher ended", 0, -9)])
    recorded = record(attempt, 1, tmp_path)
    assert (recorded.killed, recorded.cause) == (True, "DeepSpeed's launcher was killed by SIGKILL")
    monkeypatch.setattr("pretrain.run.rank_logs.refusal", lambda logs: "No space left on device")
    recorded = record(Attempt(Status(), logs, "ab", [Event("rank ended", 0, 1)]), 1, tmp_path)
    assert "the disk refuses to be written" in (restarts.refusal([recorded], 3) or "")


def test_a_lost_node_that_is_not_back_yet_is_tried_again(tmp_path, capsys, monkeypatch):
    """The first time it can't be reached, a run ends: its name may be wrong."""
    monkeypatch.setattr("launch.nodes._WAITS", (0.1, 0.2))
    path = run_file(tmp_path, tmp_path / "corpus")
    config, run, left = load(path, [], RunConfig), Run(path, []), ["works", "fails", "fails", "works", *["fails"] * 4]

    def start(pool: AgentPool, _: list[Node]) -> None:
        agent = [sys.executable, "-P", "-m", "launch", "agent"]
        broken = ["sh", "-c", "echo No route to host; exit 255"]
        pool.start(agent if left.pop(0) == "works" else broken, ["a"], 0, {})

    access = Access(start, False, "127.0.0.1", lambda agent: ("", 0), tries_again=True)
    with Nodes(run, config, [Node("a", 1)], access, StopRequests(Path(config.run.directory))) as ranks:
        assert ranks.ready()
        assert ranks.leave_out(["a"])
        assert ranks.ready()
        said = "a: sh ended with exit code 255: No route to host"
        assert capsys.readouterr().err == f"{said}; trying again in 0.1 s\n{said}; trying again in 0.2 s\n"
        assert ranks.leave_out(["a"])
        with pytest.raises(FailedError, match="No route to host"):
            ranks.ready()
    again = Nodes(run, config, [Node("a", 1)], access, StopRequests(Path(config.run.directory)))
    with again, pytest.raises(FailedError, match="No route to host"):
        again.ready()
    assert left == []
