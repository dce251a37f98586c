"""Checks the machines of a run, each through an agent and all at once; then checks all ranks together."""

import contextlib
import json
import os
import signal
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted
from data_pipeline.base.processes import PYTHON
from launch import hosts, slurm_head
from launch.nodes import Access, Agent, AgentPool, Node
from launch.protocol import Start
from launch.slurm import ClusterConfig
from launch.tools.doctor import checks
from launch.tools.doctor.checks import ALL_REDUCE, NODE_CHECKS, RUN_FILE, Check, Finding, Settings
from launch.tools.doctor.machine import locked_file
from pretrain.config import RunConfig
from pretrain.run import slurm

_SECONDS_TO_START = 120.0  # of Python on a slow file system
_POLL_SECONDS = 0.1
_PROGRAM = [*PYTHON, "-m", checks.__name__]
_INDENT = 9
_WRAPPED = textwrap.TextWrapper(80, subsequent_indent=" " * _INDENT, break_on_hyphens=False, break_long_words=False)


def machines(
    ranks: int | None, hostfile: Path | None, ssh: list[str], cluster: Path | None
) -> tuple[list[Node], Access]:
    """The hosts of `hostfile`, else the nodes of this SLURM allocation, else this machine.

    0 ranks of a node mean one for each GPU, or one. Raises UserError for a file that can't be read.
    """
    if hostfile:
        nodes = hosts.read(hostfile)
        return nodes, hosts.access(ssh)
    if allocated := os.environ.get("SLURM_JOB_NODELIST"):
        nodes = [Node(name, ranks or 0) for name in slurm.hostnames(allocated)]
        settings = load(cluster, [], ClusterConfig) if cluster else ClusterConfig()
        return nodes, slurm_head.access(nodes, settings.srun, settings.container, settings.variables)
    if cluster:
        raise UserError("--cluster: this is no SLURM allocation; run doctor in an allocation, or leave --cluster out")
    return [Node("this machine", ranks or 0)], Access()


def doctor(
    nodes: list[Node],
    access: Access,
    path: Path | None,
    overrides: list[str],
    as_json: bool,
) -> int:
    """Prints the findings; returns 1 if one would stop a run, else 0. Raises UserError for a wrong run file."""
    settings = Settings()
    if path:
        config = load(path, overrides, RunConfig)
        mlflow = config.tracking.mlflow
        settings = Settings(
            workers=config.data.workers,
            directory=str(Path(config.run.directory).absolute()),
            tracking=mlflow.uri if mlflow else None,
            run_file=(str(path.absolute()), *overrides),
        )
    findings = list(_examined(nodes, access, settings))
    print(json.dumps([asdict(finding) for finding in findings], indent=1) if as_json else report(findings))
    return int(any(finding.level == "error" for finding in findings))


@dataclass(frozen=True)
class Program:
    """A check that an agent runs with `environment`. `rank` as in `Check.findings`."""

    check: Check
    agent: Agent
    environment: dict[str, str]
    rank: str = ""


def _of_ranks(
    check: Check, settings: Settings, places: list[tuple[Agent, int]], address: str, port: int
) -> list[Program]:
    """A check by ranks together, which meet at `address` and `port`. `places`: number of ranks of each agent."""
    world = sum(ranks for _, ranks in places)
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    programs: list[Program] = []
    for agent, ranks in places:
        for local in range(ranks):
            own = {"RANK": str(len(programs)), "LOCAL_RANK": str(local), "LOCAL_SIZE": str(ranks)}
            environment = {**check.request(settings), **shared, **own}
            programs.append(Program(check, agent, environment, f"rank {len(programs)} of {world}: "))
    return programs


def _examined(nodes: list[Node], access: Access, settings: Settings) -> Iterator[Finding]:
    lock = locked_file(Path(settings.directory)) if settings.directory else contextlib.nullcontext()
    with lock as locked, AgentPool([node.name for node in nodes], access) as pool:
        pool.connect(give_up=lambda: False)
        connected = zip(pool.agents, nodes, strict=True)
        machines = [(agent, agent.machine, node.ranks) for agent, node in connected if agent.machine]
        places = [(agent, ranks or machine.gpus or 1) for agent, machine, ranks in machines]
        settings = replace(
            settings, all_ranks=sum(ranks for _, ranks in places), locked=str(locked) if locked else None
        )
        programs = [
            Program(check, agent, check.request(replace(settings, ranks_here=ranks)))
            for agent, ranks in places
            for check in NODE_CHECKS
        ]
        answers = sorted(_run(programs).items())
        findings = [replace(one, node=programs[number].agent.name) for number, answer in answers for one in answer]
        yield from [*findings, *other_versions(findings)]
        together: list[list[Program]] = []
        if not pool.problems:
            first, machine, _ = machines[0]
            if settings.run_file:
                together.append([Program(RUN_FILE, first, RUN_FILE.request(settings))])
            together.append(_of_ranks(ALL_REDUCE, settings, places, machine.address, machine.port))
        for programs in together:
            # the first process with findings is rank 0, or a rank that failed
            yield from next(filter(None, _run(programs).values()), [])
        for name, reason in pool.problems.items():
            yield Finding("node", "error", reason, "an answer", "a run can't start there either", name)


def other_versions(findings: list[Finding]) -> Iterator[Finding]:
    """Errors of nodes that have the declared versions, but other ones than the first such node."""
    fine = [one for one in findings if (one.check, one.level) == ("versions", "ok")]
    for one in fine:
        if one.found != fine[0].found:
            expected = f"{fine[0].found}, as on {fine[0].node}"
            yield replace(one, level="error", expected=expected, remedy="use one environment on all nodes")


def _run(programs: list[Program]) -> dict[int, list[Finding]]:
    """Runs programs at the same time. Returns their findings, by number, in the order of their ends."""
    agents = list(dict.fromkeys(program.agent for program in programs))
    answers: dict[int, list[Finding]] = {}
    started, running = time.monotonic(), dict(enumerate(programs))
    for number, program in running.items():
        program.agent.start(Start(_PROGRAM, program.environment, number))
    while running:
        for event in [event for agent in agents for event in agent.events()]:
            if event.kind == "program ended" and event.number in running:
                program = running.pop(event.number)
                answers[event.number] = program.check.findings(program.rank, event.code, event.lines)
        for number, program in list(running.items()):
            if program.agent.lost:
                del running[number]
            elif time.monotonic() - started > program.check.seconds + _SECONDS_TO_START:
                answers[number] = program.check.findings(program.rank, -signal.SIGALRM)
                del running[number]
        time.sleep(_POLL_SECONDS)
    return answers


def report(findings: Sequence[Finding]) -> str:
    """The findings, wrapped at 80 columns. Nodes with the same finding of a check share a line."""
    several = len({finding.node for finding in findings if finding.node}) > 1
    alike: dict[Finding, list[str]] = {}
    for one in findings:
        words = "" if one.level == "ok" and several and one.node else one.found
        alike.setdefault(replace(one, found=words, node=""), []).append(one.node)
    order = list(dict.fromkeys(finding.check for finding in findings))
    lines = []
    for one, where in sorted(alike.items(), key=lambda item: order.index(item[0].check)):
        names = [name for name in dict.fromkeys(where) if name and several]
        at = f" on {', '.join(names) if len(names) <= 4 else f'{len(names)} nodes ({names[0]} … {names[-1]})'}"
        found = f"{one.check}{at if names else ''}{': ' if one.found else ''}{one.found}"
        text = "; ".join(filter(None, (found, one.expected and f"expected {one.expected}", one.remedy)))
        lines += _WRAPPED.wrap(f"{one.level:<{_INDENT}}{text}")
    errors, warnings = (sum(finding.level == level for finding in findings) for level in ("error", "warning"))
    stops = counted(errors, "error") if errors else "nothing"
    return "\n".join([*lines, f"{stops} would stop a run; {counted(warnings, 'warning')}"])
