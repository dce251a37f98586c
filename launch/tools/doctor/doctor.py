"""Checks the machines of a run, each through an agent and all at once; then checks all ranks together."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted
from data_pipeline.base.processes import PYTHON
from launch import hosts, slurm_head
from launch.nodes import Access, Agent, AgentPool, Node
from launch.protocol import Start
from launch.slurm import ClusterConfig
from launch.tools.doctor import checks
from launch.tools.doctor.checks import Finding, Settings
from pretrain.config import RunConfig
from pretrain.run import slurm
from pretrain.training.preflight import preflight

_SECONDS = 360.0  # for all checks of a node or a rank, and for Python to start on a slow file system
_POLL_SECONDS = 0.1
_PROGRAM = [*PYTHON, "-m", checks.__name__]
_LONGEST_ERROR = 200  # characters


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


def doctor(nodes: list[Node], access: Access, path: Path | None, overrides: list[str], as_json: bool) -> int:
    """Prints the findings; returns 1 if one would stop a run, else 0. Raises UserError for a wrong run file."""
    config = load(path, overrides, RunConfig) if path else None
    findings = list(_examined(nodes, access, path, config))
    print(json.dumps([asdict(finding) for finding in findings], indent=1) if as_json else report(findings))
    return int(any(finding.level == "error" for finding in findings))


@dataclass(frozen=True)
class Program:
    """The checks of a node or, with RANK etc. in `environment`, of a rank, which an agent runs."""

    agent: Agent
    kind: str
    settings: Settings
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, number: int) -> None:
        request = {checks.REQUEST: json.dumps([self.kind, asdict(self.settings)])}
        self.agent.start(Start(_PROGRAM, {**request, **self.environment}, number))

    def findings(self, code: int, lines: Sequence[str] = ()) -> list[Finding]:
        """The findings of the program, which has ended with the exit code `code` after `lines`."""
        for line in lines:
            if line.startswith(checks.REPORT):
                return [Finding(**one) for one in json.loads(line.removeprefix(checks.REPORT))]
        late = f"no answer within {_SECONDS:g} s" if code == -signal.SIGALRM else f"exit code {code}"
        problem = lines[-1][:_LONGEST_ERROR] if lines else late
        if self.kind == "rank":
            return [Finding("all-reduce", "error", f"rank {self.environment['RANK']}: {problem}", "", checks.REACHABLE)]
        return [Finding("node", "error", problem, "", checks.WAITING)]


def _ranks(places: list[tuple[Agent, int]], settings: Settings, address: str, port: int) -> list[Program]:
    """The ranks, which meet at `address` and `port`. `places`: number of ranks of each agent."""
    shared = {"WORLD_SIZE": str(settings.all_ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    programs: list[Program] = []
    for agent, ranks in places:
        for local in range(ranks):
            own = {"RANK": str(len(programs)), "LOCAL_RANK": str(local), "LOCAL_SIZE": str(ranks)}
            programs.append(Program(agent, "rank", settings, {**shared, **own, "OMP_NUM_THREADS": "1"}))
    return programs


def _shared_file(directory: Path | None) -> contextlib.AbstractContextManager[Any]:
    """A new file beside the run directory, which goes with the block; None if it can't be created, as checks report."""
    with contextlib.suppress(OSError):
        if directory:
            return tempfile.NamedTemporaryFile(dir=checks.existing(directory), prefix=".doctor-")
    return contextlib.nullcontext()


def _examined(nodes: list[Node], access: Access, path: Path | None, config: RunConfig | None) -> Iterator[Finding]:
    directory = Path(config.run.directory).absolute() if config else None
    with _shared_file(directory) as file, AgentPool([node.name for node in nodes], access) as pool:
        pool.connect(give_up=lambda: False)
        connected = [(agent, agent.machine, node) for agent, node in zip(pool.agents, nodes, strict=True)]
        places = [(agent, node.ranks or machine.gpus or 1) for agent, machine, node in connected if machine]
        settings = Settings(all_ranks=sum(ranks for _, ranks in places), shared=file and file.name)
        if config:
            settings = replace(settings, directory=str(directory))
        programs = [Program(agent, "node", replace(settings, ranks_here=ranks)) for agent, ranks in places]
        answers = sorted(_run(programs).items())
        findings = [replace(one, node=programs[number].agent.name) for number, answer in answers for one in answer]
        yield from [*findings, *other_versions(findings)]
        first = pool.agents[0].machine
        if first and not pool.problems:
            # the first process with findings is rank 0, or a rank that failed
            ranks = _ranks(places, settings, first.address, first.port)
            yield from next(filter(None, _run(ranks).values()), [])
        for name, reason in pool.problems.items():
            yield Finding("node", "error", reason, "an answer", "a run can't start there either", name)
        complete = not pool.problems
    # without agents, since a slow disk may take longer than the time limit of messages
    if complete and path and config:
        yield from _run_file(path, config, settings.all_ranks)


def _run_file(path: Path, config: RunConfig, ranks: int) -> Iterator[Finding]:
    """Whether the run file is valid for these ranks, and its corpora exist."""
    try:
        setup = preflight(config, ranks, here=False, folder=path.absolute().parent)
    except UserError as error:
        yield from (Finding("run file", "error", line) for line in str(error).splitlines())
        return
    yield Finding("run file", "ok", f"{path} and its corpora are valid for {counted(ranks, 'rank')}")
    yield from (Finding("run file", "warning", line) for line in setup.warnings)


def other_versions(findings: list[Finding]) -> Iterator[Finding]:
    """Errors of nodes that have other versions than the first node."""
    found = [one for one in findings if one.check == "versions"]
    for one in found:
        if one.found != found[0].found:
            expected = f"{found[0].found}, as on {found[0].node}"
            yield replace(one, level="error", expected=expected, remedy="use one environment on all nodes")


def _run(programs: list[Program]) -> dict[int, list[Finding]]:
    """Runs programs at the same time. Returns their findings, by number, in the order of their ends."""
    answers: dict[int, list[Finding]] = {}
    started, running = time.monotonic(), dict(enumerate(programs))
    for number, program in running.items():
        program.start(number)
    while running:
        for event in [event for agent in {program.agent for program in programs} for event in agent.events()]:
            if event.kind == "program ended" and event.number in running:
                answers[event.number] = running.pop(event.number).findings(event.code, event.lines)
        for number, program in list(running.items()):
            if program.agent.lost:
                del running[number]
            elif time.monotonic() - started > _SECONDS:
                answers[number] = running.pop(number).findings(-signal.SIGALRM)
        time.sleep(_POLL_SECONDS)
    return answers


def report(findings: Sequence[Finding]) -> str:
    """A line for each finding. Nodes with the same finding of a check share a line."""
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
        lines.append(f"{one.level:<9}{text}")
    errors, warnings = (sum(finding.level == level for finding in findings) for level in ("error", "warning"))
    stops = counted(errors, "error") if errors else "nothing"
    return "\n".join([*lines, f"{stops} would stop a run; {counted(warnings, 'warning')}"])
