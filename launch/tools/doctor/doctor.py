"""Checks the machines of a run one beside the other, then all of their ranks together."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_pipeline.foundation.config_file import load
from launch.tools.doctor import ranks
from launch.tools.doctor.checks import CHECKS, OF_A_NODE, Settings, checked
from launch.tools.doctor.directory import clock_finding, held
from launch.tools.doctor.findings import Finding, report
from launch.tools.doctor.places import Place, everywhere
from launch.tools.doctor.ranks import Answers, Group
from pretrain.config import RunConfig

_SECONDS_TO_START = 120.0  # a node's Python, on a slow file system


def doctor(place: Place, path: Path | None, overrides: list[str], as_json: bool) -> int:
    """Prints what was found; returns 0 if nothing would stop a run, else 1. Raises UserError for a wrong run file."""
    findings = list(_examined(place, _settings(path, overrides)))
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
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


def _examined(place: Place, settings: Settings) -> Iterator[Finding]:
    names = [node.name for node in place.nodes]
    problems: dict[str, str] = {}
    hellos: dict[int, dict[str, Any]] = {}
    ahead: dict[int, float] = {}
    found: dict[int, list[Finding]] = {}
    directory = os.getcwd()  # noqa: PTH109
    holding = held(Path(settings.directory)) if settings.directory else contextlib.nullcontext()
    with holding as locked:
        shared = replace(settings, locked=str(locked) if locked else None)
        each = [dataclasses.asdict(replace(shared, ranks=node.ranks or None)) for node in place.nodes]
        limit = _SECONDS_TO_START + max(CHECKS[name].seconds for name in OF_A_NODE)
        for line in everywhere(place, {"settings": each, "directory": directory}, limit, problems):
            index = line.message["index"]
            # a line may be late, never early: the one that was quickest says most
            ahead[index] = max(line.message["clock"] - line.arrived, ahead.get(index, float("-inf")))
            if "host" in line.message:
                hellos[index] = line.message
            else:
                found.setdefault(index, []).append(replace(Finding(**line.message["finding"]), node=names[index]))
    for index, name in enumerate(names):
        if index not in found:
            reason = problems.get(name, "it didn't answer")
            yield Finding("node", "fault", reason, "an answer", "a run can't start there either", name)
        yield from found.get(index, ())
    if len(names) > 1:
        yield from _differences(names, hellos)
        yield from (
            replace(clock_finding("this machine's", seconds), node=names[index])
            for index, seconds in sorted(ahead.items())
        )
    if len(hellos) == len(names):
        per_node = [hellos[index]["ranks"] for index in range(len(names))]
        if settings.run_file:
            yield from checked(["run_file"], replace(settings, all_ranks=sum(per_node)))
        group = Group(per_node, _master(place, hellos[0]), hellos[0]["port"])
        yield _all_reduce(place, group, directory)


def _master(place: Place, first: dict[str, Any]) -> str:
    """The address at which the ranks meet, on the first machine."""
    reached = first["address"] if len(place.nodes) > 1 else None
    return reached if reached and not reached.startswith("127.") else place.master


def _differences(names: list[str], hellos: dict[int, dict[str, Any]]) -> Iterator[Finding]:
    if not hellos:
        return
    reference = hellos[min(hellos)]["versions"]
    for index, hello in hellos.items():
        for package, number in hello["versions"].items():
            if number != reference[package]:
                expected = f"{reference[package]}, as on {names[min(hellos)]}"
                found = f"{package} {number or 'is missing'}"
                remedy = "use one environment on all nodes"
                yield Finding("versions", "fault", found, expected, remedy, names[index])


def _all_reduce(place: Place, group: Group, directory: str) -> Finding:
    answers, problems = Answers(), dict[str, str]()
    given = {"group": dataclasses.asdict(group), "directory": directory}
    for line in everywhere(place, given, group.seconds + _SECONDS_TO_START, problems):
        answers.add(Answers(**line.message["answers"]))
    answers.errors |= problems
    return ranks.finding(group, answers)
