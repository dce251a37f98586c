"""What became of a cell: judged from its run directory, shown as a line of a table, and summed up."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checks.faults.cells import RANKS, STEPS, Cell
from checks.faults.happening import CLOCKS
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.directory import checkpoint_directory
from pretrain.run import restarts
from pretrain.run.metrics_file import read_metrics
from tests.support.recorded import largest_relative_difference, recorded_rows
from tests.support.runs import steps_taken

ROUNDING = 1e-6  # of losses on another number of ranks, which add gradients in another order
_AGAIN = re.compile(r"starting attempt 2 ")
_WARNING = re.compile(r"warning|failed|MLflow")
_ASIDE = re.compile(r"warning: |.* is no longer slow$")  # unless it names the fault
COLUMNS = ["cell", "fault", "point", "rank", "step", "attempt", "hosts", "s to detection", "s to the next step"]
COLUMNS += ["steps twice", "result", "first line"]


@dataclass
class Verdict:
    """What became of a cell; times in seconds, None where nothing failed. `wall`: how long the cell took."""

    cell: Cell
    codes: list[int]
    problems: list[str] = field(default_factory=list)
    detected: float | None = None
    recovered: float | None = None
    steps_twice: int = 0
    first_line: str = ""
    wall: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What a run has left: losses, digests of the rows by step, and checksums of the last checkpoint's tensors."""

    losses: dict[int, float]
    rows: dict[int, list[str]]
    weights: dict[str, str]


def outcome(folder: Path) -> Outcome:
    directory = folder / "run"
    try:
        files = checkpoint_index.read(checkpoint_directory(directory, STEPS)).files
    except Exception:  # whatever is wrong with it, the weights aren't those that are expected
        files = {}
    return Outcome(
        {row.step: row.metrics["train/loss"] for row in read_metrics(directory) if "train/loss" in row.metrics},
        recorded_rows(folder / "rows"),
        {name: file.sha256 for name, file in files.items() if name.endswith(".safetensors")},
    )


def judged(
    cell: Cell, codes: list[int], folder: Path, undisturbed: Outcome, left: list[str], addresses: list[str]
) -> Verdict:
    """Compares what a cell's runs have left with the undisturbed run. `left`: processes that outlived them."""
    verdict, found = Verdict(cell, codes), outcome(folder)
    problems, marker, directory = verdict.problems, folder / "marker", folder / "run"
    if codes != cell.codes:
        problems.append(f"exit codes {codes}, not {cell.codes}")
    if not marker.exists():
        problems.append("the fault never happened")
    if cell.ranks_after == RANKS:
        problems += ["other losses"] if found.losses != undisturbed.losses else []
        problems += ["other weights"] if found.weights != undisturbed.weights else []
    elif (difference := largest_relative_difference(found.losses, undisturbed.losses)) > ROUNDING:
        problems.append(f"losses differ by {difference:.1e}")
    if found.rows != undisturbed.rows:
        wrong = [step for step in range(STEPS) if found.rows.get(step) != undisturbed.rows.get(step)]
        problems.append(f"other rows in the steps from index {wrong[0]} on" if wrong else "more steps")
    if left:
        problems.append(f"processes left: {left}")
    taken = steps_taken(directory)
    verdict.steps_twice = len(taken) - len(set(taken))
    if marker.exists():
        _judge_times(verdict, directory, marker.stat().st_mtime)
    named = cell.named(addresses)
    if cell.may_pass and not _failed(directory, cell.attempt):
        named = None
    verdict.first_line = first_line(folder, cell.attempt == 2, named)
    if named and named not in verdict.first_line:
        problems.append(f"the first line doesn't say {named!r}")
    return verdict


def _judge_times(verdict: Verdict, directory: Path, happened: float) -> None:
    records = restarts.read(directory)
    if verdict.cell.fault in CLOCKS:
        return  # the records' times are wrong
    failed = [one for one in _failed(directory, verdict.cell.attempt) if one.ended > happened - 0.1]
    if failed:
        verdict.detected = max(0.0, failed[0].ended - happened)
    since = failed[0].ended if failed else happened
    attempt = failed[0].attempt if failed else 0
    if failed or verdict.cell.fault == "the head killed":
        next_steps = [one.trained_from for one in records if one.attempt > attempt and one.trained_from]
        verdict.recovered = next((one - since for one in next_steps if one > since), None)


def _failed(directory: Path, attempt: int) -> list[restarts.AttemptRecord]:
    """The records of attempts that failed, from this attempt on."""
    return [one for one in restarts.read(directory) if one.outcome == "failed" and one.attempt >= attempt]


def first_line(folder: Path, second_attempt: bool, named: str | None) -> str:
    """The first line on the terminal, of what followed the second start where the fault comes after it.

    What is said aside is passed over, unless it has the words `named`: on a busy machine a rank is slow, and no longer.
    """
    said = (folder / "stderr").read_text(errors="replace").splitlines()
    if second_attempt:
        again = next((place for place, line in enumerate(said) if _AGAIN.match(line)), -1)
        said = said[again + 1 :]
    shown = (folder / "stdout").read_text(errors="replace").splitlines()
    lines = [*said, *(line for line in shown if _WARNING.search(line))]
    telling = (line for line in lines if (named and named in line) or not _ASIDE.match(line))
    return next(telling, "") or next(iter(lines), "")


def line(verdict: Verdict) -> list[str]:
    """What cells.csv has of a verdict, by COLUMNS."""
    cell = verdict.cell
    times = ["" if one is None else f"{one:.1f}" for one in (verdict.detected, verdict.recovered)]
    result = "; ".join(verdict.problems) or ("same" if cell.ranks_after == RANKS else "same on 1 rank")
    where = [cell.fault, cell.point, *map(str, (cell.rank, cell.from_step, cell.attempt, cell.hosts))]
    said = re.sub(r"; its log: \S+", "", verdict.first_line)[:100]
    return [str(cell.number), *where, *times, str(verdict.steps_twice), result, said]


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts, and quantiles of times in seconds. MTTR is of runs that continued by themselves."""
    detected = [one for one in verdicts if one.detected is not None]
    deaths = [one.detected for one in detected if not one.cell.hangs]
    hangs = [one.detected for one in detected if one.cell.hangs]
    unattended = [one for one in verdicts if len(one.codes) == 1]
    late = [one.cell.number for one in detected if (one.detected or 0) > one.cell.seconds_to_detect]
    return {
        "cells": len(verdicts),
        "same": sum(not one.problems for one in verdicts),
        "not_same": [one.cell.number for one in verdicts if one.problems],
        "detection_of_deaths": _quantiles(deaths),
        "detection_of_hangs": _quantiles(hangs),
        "detected_late": late,
        "mttr_one_host": _quantiles([one.recovered for one in unattended if one.cell.hosts == 1]),
        "mttr_two_hosts": _quantiles([one.recovered for one in unattended if one.cell.hosts == 2]),
        "recovery_by_another_command": _quantiles([one.recovered for one in verdicts if len(one.codes) > 1]),
        "steps_twice": sum(one.steps_twice for one in verdicts),
        "most_steps_twice": max((one.steps_twice for one in verdicts), default=0),
    }


def _quantiles(values: Sequence[float | None]) -> dict[str, float | int]:
    found = sorted(value for value in values if value is not None)
    if not found:
        return {"n": 0}
    p95 = found[min(len(found) - 1, int(0.95 * len(found)))]
    return {"n": len(found), "p50": round(statistics.median(found), 2), "p95": round(p95, 2)}


def append(file: Path, seed: int, verdict: Verdict) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps({"seed": seed, **asdict(verdict)}) + "\n")


def finished(file: Path, seed: int) -> dict[int, Verdict]:
    """The verdicts of an earlier start of this matrix, by number."""
    if not file.exists():
        return {}
    found = [json.loads(text) for text in file.read_text().splitlines() if text.endswith("}")]
    verdicts = [
        Verdict(Cell(**one.pop("cell")), **{key: value for key, value in one.items() if key != "seed"})
        for one in found
        if one["seed"] == seed
    ]
    return {verdict.cell.number: verdict for verdict in verdicts}


def forget(file: Path, number: int) -> None:
    """Drops the verdicts of a cell, which is run again."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    file.write_text("".join(text for text in lines if json.loads(text)["cell"]["number"] != number))
