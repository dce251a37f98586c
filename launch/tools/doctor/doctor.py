"""Checks the machines of a run at the same time, each through an agent, then all of their ranks together."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data_pipeline.foundation.config_file import load
from launch import hosts, slurm_head
from launch.agent_pool import Agent, AgentPool
from launch.config import ClusterConfig
from launch.multi_node import Access, Node
from launch.protocol import StartProgram
from launch.tools.doctor import all_reduce
from launch.tools.doctor.all_reduce import Answers, RankGroup
from launch.tools.doctor.checks import CHECKS, NODE_CHECKS, REQUEST, Settings, checked
from launch.tools.doctor.directory import clock_finding, locked_file
from launch.tools.doctor.findings import Finding, report
from pretrain.config import RunConfig
from pretrain.run import slurm

_SECONDS_TO_START = 120.0  # a node's Python, on a slow file system
_SECONDS_BETWEEN_LOOKS = 0.1


def here(ranks: int | None) -> tuple[list[Node], Access]:
    """This machine. A node of 0 ranks has one for each GPU, or one."""
    name = "this machine"

    def start(pool: AgentPool, chosen: list[Node]) -> None:
        pool.start([sys.executable, "-P", "-m", "launch", "agent"], [name], 0, {})

    return [Node(name, ranks or 0)], Access(start, False, "127.0.0.1", lambda agent: ("127.0.0.1", 0))


def on_hosts(hostfile: Path, ssh: list[str]) -> tuple[list[Node], Access]:
    """The hosts of a file in DeepSpeed's format. Raises UserError for a file that can't be read."""
    nodes = hosts.read(hostfile)
    return nodes, hosts.access(nodes, None, ssh)


def in_allocation(ranks: int | None, cluster: ClusterConfig) -> tuple[list[Node], Access]:
    """The nodes of the SLURM allocation that this process is in, with `ranks` on each, in the cluster's container."""
    nodes = [Node(name, ranks or 0) for name in slurm.hostnames(os.environ["SLURM_JOB_NODELIST"])]
    return nodes, slurm_head.access(nodes, cluster.srun, cluster.container, cluster.variables)


def doctor(nodes: list[Node], access: Access, path: Path | None, overrides: list[str], as_json: bool) -> int:
    """Prints what was found; returns 0 if nothing would stop a run, else 1. Raises UserError for a wrong run file."""
    findings = list(_examined(nodes, access, _settings(path, overrides)))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(report(findings))
    return int(any(finding.level == "fault" for finding in findings))


def _settings(path: Path | None, overrides: list[str]) -> Settings:
    if path is None:
        return Settings()
    config = load(path, overrides, RunConfig)
    mlflow = config.tracking.mlflow
    return Settings(
        workers=config.data.workers,
        directory=str(Path(config.run.directory).absolute()),
        tracking=mlflow.uri if mlflow else None,
        run_file=(str(path.absolute()), *overrides),
    )


def _examined(nodes: list[Node], access: Access, settings: Settings) -> Iterator[Finding]:
    lock = locked_file(Path(settings.directory)) if settings.directory else contextlib.nullcontext()
    with lock as locked, AgentPool([node.name for node in nodes], access.address) as pool:
        access.start(pool, nodes)
        pool.connect(give_up=lambda: False, seconds=_SECONDS_TO_START)
        agents = dict(sorted(pool.agents.items()))
        ranks = {index: nodes[index].ranks or agent.handshake.gpus or 1 for index, agent in agents.items()}
        shared = replace(settings, locked=str(locked) if locked else None)
        requests = {index: asdict(replace(shared, ranks=nodes[index].ranks or None)) for index in agents}
        limit = _SECONDS_TO_START + max(CHECKS[name].seconds for name in NODE_CHECKS)
        found: dict[int, list[Finding]] = {index: [] for index in agents}
        versions: dict[int, dict[str, str]] = {}
        ahead: dict[int, float] = {}
        for index, message, arrived in _reports(agents, "checks", requests, limit, pool.problems):
            # a message may be late, never early: the one that was quickest says most
            ahead[index] = max(message["clock"] - arrived, ahead.get(index, float("-inf")))
            if "versions" in message:
                versions[index] = message["versions"]
            else:
                found[index].append(Finding(**message["finding"], node=nodes[index].name))
        for index, node in enumerate(nodes):
            if reason := pool.problems.get(node.name):
                yield Finding("node", "fault", reason, "an answer", "a run can't start there either", node.name)
            yield from found.get(index, ())
        if len(nodes) > 1:
            yield from _differences([node.name for node in nodes], versions)
            for index, seconds in sorted(ahead.items()):
                yield replace(clock_finding("this machine's", seconds), node=nodes[index].name)
        if not pool.problems:
            if settings.run_file:
                yield from checked(["run_file"], replace(settings, all_ranks=sum(ranks.values())))
            yield _all_reduce(agents, access, list(ranks.values()), pool.problems)


def _differences(names: list[str], versions: dict[int, dict[str, str]]) -> Iterator[Finding]:
    """Packages whose versions aren't those of the first node that has answered."""
    for index, numbers in versions.items():
        reference = min(versions)
        for package, number in numbers.items():
            if number != (expected := versions[reference][package]):
                found = f"{package} {number or 'is missing'}"
                remedy = "use one environment on all nodes"
                where = f"{expected}, as on {names[reference]}"
                yield Finding("versions", "fault", found, where, remedy, names[index])


def _all_reduce(agents: dict[int, Agent], access: Access, per_node: list[int], problems: dict[str, str]) -> Finding:
    group = RankGroup(per_node, access.master(agents[0])[0], agents[0].handshake.port)
    answers = Answers()
    requests = {index: {**asdict(group), "node": index} for index in agents}
    for _, message, _ in _reports(agents, "all_reduce", requests, group.seconds + _SECONDS_TO_START, problems):
        answers.add(Answers(**message))
    answers.errors |= problems
    return all_reduce.finding(group, answers)


def _reports(
    agents: dict[int, Agent], module: str, requests: Mapping[int, Any], seconds: float, problems: dict[str, str]
) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Runs a module of this folder on each node, which gets its request; yields each node's reports as they arrive.

    With each report comes this machine's time. `problems` gets the names of nodes where the module fails or hasn't
    ended after `seconds`, and the reason.
    """
    for index, agent in agents.items():
        agent.start_program(StartProgram(f"launch.tools.doctor.{module}", {REQUEST: json.dumps(requests[index])}))
    running, deadline = dict(agents), time.monotonic() + seconds
    while running and time.monotonic() < deadline:
        for index, agent in list(running.items()):
            for event in agent.events():
                if event.kind == "report":
                    yield index, json.loads(event.lines[0]), time.time()
                elif event.kind == "launcher ended":
                    running.pop(index)
                    if event.code:
                        said = "; ".join(event.lines[-3:])
                        problems[agent.name] = f"ended with exit code {event.code}: {said}"
            if index in running and agent.lost:
                problems[running.pop(index).name] = agent.lost
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    problems |= {agent.name: f"no answer within {seconds:g} s" for agent in running.values()}
