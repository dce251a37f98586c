"""Checks the machines of a run at the same time, each through an agent, then all of their ranks together."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from launch import hosts, slurm_head
from launch.agent_pool import Agent, AgentPool
from launch.nodes import Access, Node
from launch.protocol import Event, StartProgram
from launch.slurm import ClusterConfig
from launch.tools.doctor import all_reduce, numerics
from launch.tools.doctor.all_reduce import Answers, RankGroup
from launch.tools.doctor.checks import NODE_CHECKS, RUN_CHECKS, Check, failure, request
from launch.tools.doctor.directory import clock_finding, locked_file
from launch.tools.doctor.findings import Finding, Settings, report
from pretrain.config import RunConfig
from pretrain.run import slurm

_SECONDS_TO_START = 120.0  # a node's Python, on a slow file system
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Program:
    """A module of this folder to run on the node with number `node`, for `seconds` at most."""

    node: int
    module: str
    environment: dict[str, str]
    seconds: float


@dataclass
class _NodeReport:
    """What the checks of one node have reported. `ahead`: the seconds by which its clock is ahead."""

    findings: list[Finding] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    ahead: float = float("-inf")


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


def doctor(
    nodes: list[Node],
    access: Access,
    path: Path | None,
    overrides: list[str],
    as_json: bool,
    with_numerics: bool = False,
) -> int:
    """Prints what was found; returns 0 if nothing would stop a run, else 1. Raises UserError for a wrong run file.

    `with_numerics`: whether DeepSpeed is compared with a plain loop, on the first node.
    """
    if with_numerics and path is None:
        raise UserError("--numerics: missing RUN.yaml, whose settings DeepSpeed is examined with")
    findings = list(_examined(nodes, access, _settings(path, overrides), with_numerics))
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


def _examined(nodes: list[Node], access: Access, settings: Settings, with_numerics: bool) -> Iterator[Finding]:
    lock = locked_file(Path(settings.directory)) if settings.directory else contextlib.nullcontext()
    with lock as locked, AgentPool([node.name for node in nodes], access.address) as pool:
        access.start(pool, nodes)
        pool.connect(give_up=lambda: False, seconds=_SECONDS_TO_START)
        agents = dict(sorted(pool.agents.items()))
        ranks = {index: nodes[index].ranks or agent.handshake.gpus or 1 for index, agent in agents.items()}
        shared = replace(settings, locked=str(locked) if locked else None, all_ranks=sum(ranks.values()))
        reports = _check(
            agents, NODE_CHECKS, {index: replace(shared, ranks=nodes[index].ranks or None) for index in agents}, pool
        )
        for index, node in enumerate(nodes):
            if reason := pool.problems.get(node.name):
                yield Finding("node", "fault", reason, "an answer", "a run can't start there either", node.name)
            if index in reports:
                yield from (replace(finding, node=node.name) for finding in reports[index].findings)
        if len(nodes) > 1:
            versions = {index: report.versions for index, report in reports.items() if report.versions}
            yield from _differences([node.name for node in nodes], versions)
            for index, report in reports.items():
                if report.versions:
                    yield replace(clock_finding("this machine's", report.ahead), node=nodes[index].name)
        if not pool.problems:
            if settings.run_file:
                first = {0: replace(shared, ranks=nodes[0].ranks or None)}
                yield from _check(agents, RUN_CHECKS, first, pool)[0].findings
            yield from _all_reduce(agents, access, list(ranks.values()), pool)
            if with_numerics and not pool.problems:
                yield _numerics(agents[0], shared, pool)


def _check(
    agents: dict[int, Agent], checks: dict[str, Check], settings: dict[int, Settings], pool: AgentPool
) -> dict[int, _NodeReport]:
    """What the checks find on each of the nodes in `settings`; all run at the same time."""
    requests = [(index, name) for index in settings for name in checks]
    programs = [
        Program(index, "checks", request(name, checks[name], settings[index]), checks[name].seconds)
        for index, name in requests
    ]
    reports = {index: _NodeReport() for index in settings}
    findings: dict[int, list[Finding]] = {}  # by program
    for number, event, arrived in _run(agents, programs, pool.problems):
        index, name = requests[number]
        if event.kind == "report":
            said = json.loads(event.lines[0])
            # a message may be late, never early: the one that was quickest says most
            reports[index].ahead = max(reports[index].ahead, said["clock"] - arrived)
            reports[index].versions = said["versions"]
            findings[number] = [Finding(**finding) for finding in said["findings"]]
        elif event.code:
            findings[number] = [failure(checks[name], event.code, event.lines)]
    for number, found in sorted(findings.items()):
        reports[requests[number][0]].findings += found
    return reports


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


def _all_reduce(agents: dict[int, Agent], access: Access, per_node: list[int], pool: AgentPool) -> Iterator[Finding]:
    group = RankGroup(per_node, access.master(agents[0])[0], agents[0].handshake.port)
    programs = [
        Program(index, "all_reduce_rank", environment, group.seconds)
        for index, agent in agents.items()
        for environment in group.environments(index, on_gpus=agent.handshake.gpus > 0)
    ]
    answers = Answers()
    for rank, event, _ in _run(agents, programs, pool.problems):
        if event.kind == "report":
            answers.add_report(event.lines[0])
        elif event.code:
            answers.errors[f"rank {rank}"] = event.lines[-1] if event.lines else f"ended with {event.code}"
    answers.errors |= pool.problems
    yield all_reduce.finding(group, answers)
    yield from all_reduce.slow_parts(group, answers.parts, [agent.name for agent in agents.values()])


def _numerics(agent: Agent, settings: Settings, pool: AgentPool) -> Finding:
    """DeepSpeed against a plain loop, on ranks of the first node."""
    gpus = agent.handshake.gpus
    reports: list[str] = []
    errors: dict[str, str] = {}
    group = numerics.group(gpus, agent.handshake.port)
    environments = numerics.environments(group, settings, on_gpus=gpus > 0)
    programs = [Program(0, "numerics_rank", environment, group.seconds) for environment in environments]
    for rank, event, _ in _run({0: agent}, programs, pool.problems):
        if event.kind == "report":
            reports += event.lines
        elif event.code:
            errors[f"rank {rank}"] = event.lines[-1] if event.lines else f"ended with {event.code}"
    return numerics.finding(reports, errors | pool.problems)


def _run(
    agents: dict[int, Agent], programs: Sequence[Program], problems: dict[str, str]
) -> Iterator[tuple[int, Event, float]]:
    """Runs programs at the same time; yields their reports and their ends: (program, event, this machine's time).

    A program that takes too long ends as if by SIGALRM. `problems` gets the names of nodes that no longer answer, and
    the reason.
    """
    started, running = time.monotonic(), dict(enumerate(programs))
    for number, program in running.items():
        module = f"launch.tools.doctor.{program.module}"
        agents[program.node].start_program(StartProgram(module, program.environment, number))
    while running:
        for event in [event for agent in agents.values() for event in agent.events()]:
            if event.number in running and event.kind in ("report", "launcher ended"):
                yield event.number, event, time.time()
                if event.kind == "launcher ended":
                    del running[event.number]
        for number, program in list(running.items()):
            agent = agents[program.node]
            if agent.lost:
                problems[agent.name] = agent.lost
                del running[number]
            elif time.monotonic() - started > program.seconds + _SECONDS_TO_START:
                del running[number]
                yield number, Event("launcher ended", number, -signal.SIGALRM), time.time()
        time.sleep(_POLL_SECONDS)
