"""The tables of builds, injected faults, waiting and object storage."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from checks.faults import happening
from checks.faults.cells import MLFLOW, RANKS, Cell
from checks.results.data import number, power, rows_of
from checks.results.tables import Tables, register
from data_pipeline.base.json_file import read_json

TABLES: Tables = {}
table = partial(register, TABLES)


@table("corpus-build")
def _build(folder: Path) -> Iterator[list[str]]:
    """A build of enwik8 and its forecast: processor seconds of each stage that takes a tenth of a second, and sizes."""
    plan, report = (read_json(folder / f"corpus/enwik8-{name}.json", dict[str, Any]) for name in ("plan", "report"))
    expected = {stage["name"]: stage for stage in plan["stages"]}
    for stage in report["stages"]:
        taken, speed = stage["core_seconds"], stage["megabytes_per_core_second"]
        if taken >= 0.1:
            forecast = number(expected[stage["name"]]["core_seconds"], 1)
            yield [f"`{stage['name']}`, core-seconds", forecast, number(taken, 1), number(speed, 1)]
    sums = (sum(stage["core_seconds"] for stage in one["stages"]) for one in (plan, report))
    yield ["all stages, core-seconds", *(number(one, 1) for one in sums), ""]
    text = report["sources"]["enwiki"]["text_bytes"] / 1e6
    yield ["text, MB", number(expected["deduplicated"]["megabytes"], 1), number(text, 1), ""]
    tokens = plan["tokens"]["train"], report["splits"]["train"]["tokens"]
    yield ["training tokens, millions", *(number(one / 1e6, 2) for one in tokens), ""]


@table("corpus-near-duplicates")
def _near_duplicates(folder: Path) -> Iterator[list[str]]:
    """For each twentieth of similarity from 0.5 on: pairs found, the theory's mean, and its 95 % interval."""
    pairs: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for row in rows_of(folder / "corpus/near-duplicates.csv"):
        shape = int(row["bands"]), int(row["rows"])
        pairs.setdefault(shape, []).append((float(row["similarity"]), int(row["found"])))
    for twentieth in range(10, 20):
        cells = []
        for (bands, rows), given in pairs.items():
            inside = [one for one in given if min(int(one[0] * 20 + 1e-9), 19) == twentieth]
            theory = [1 - (1 - similarity**rows) ** bands for similarity, _ in inside]
            mean, half = fmean(theory), 1.96 * math.sqrt(sum(one * (1 - one) for one in theory)) / len(theory)
            interval = f"{max(0.0, mean - half):.3f}–{min(1.0, mean + half):.3f}"
            cells += [number(fmean(found for _, found in inside), 3), number(mean, 3), interval]
        yield [f"{twentieth / 20:.2f}–{(twentieth + 1) / 20:.2f}", str(len(inside)), *cells]


_KINDS = {
    "SIGKILL, SIGSEGV, SIGABRT, SIGBUS": [*happening.KILLS],
    "head, agent killed": ["the head killed", "the agent killed"],
    "SIGSTOP, hang, hang with the GIL": [*happening.HANGS],
    "exception, out of memory, exit with 0": [*happening.ERRORS, "exception in another thread", "exit with 0"],
    "a loader's worker killed": ["a loader's worker killed"],
    "ENOSPC, EIO, EROFS": [*happening.DISK],
    "torn rename": ["torn rename"],
    "clock ± 1 h": [*happening.CLOCKS],
    "a bit of a weight": ["a bit of a weight"],
    "straggler, a slow step": ["straggler", "a slow step"],
    "MLflow refused, hanging, 500": [*MLFLOW],
    "a lost host": ["a lost host"],
    "a slow host": ["a slow host"],
    "a host cut off": ["a host cut off", "a host cut off for a while"],
}


def _same(rows: list[dict[str, str]]) -> list[str]:
    """How many rows there are, and how many of them are the undisturbed run's."""
    return [str(len(rows)), str(sum(row["result"].startswith("same") for row in rows))]


@table("faults-kinds")
def _faults_kinds(folder: Path) -> Iterator[list[str | None]]:
    cells = rows_of(folder / "faults/cells.csv")
    for kind, faults in _KINDS.items():
        yield [kind, *_same([row for row in cells if row["fault"] in faults]), None]
    yield ["**together**", *_same(cells), None]


@table("engine-optimizers")
def _optimizers(folder: Path) -> Iterator[list[str]]:
    """The largest difference of the three stages."""
    largest: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows_of(folder / "engine/optimizers.csv"):
        of_optimizer, key = largest.setdefault(row["optimizer"], {}), (row["precision"], row["ranks"])
        of_optimizer[key] = max(of_optimizer.get(key, 0.0), float(row["difference"]))
    for name, found in largest.items():
        yield [f"`{name}`", *(power(value) for value in found.values())]


def _cell(row: dict[str, str]) -> Cell:
    numbers = (int(row[name]) for name in ("rank", "step", "attempt", "hosts"))
    alone = row["result"].endswith("on 1 rank")
    return Cell(int(row["cell"]), row["fault"], row["point"], *numbers, RANKS - alone)


@table("faults-times")
def _faults_times(folder: Path) -> Iterator[list[str | None]]:
    """Of the cells' times in tenths of a second."""
    rows = [(_cell(row), row) for row in rows_of(folder / "faults/cells.csv")]
    detected = [(cell, float(row["s to detection"])) for cell, row in rows if row["s to detection"]]
    recovered = [(cell, float(row["s to the next step"])) for cell, row in rows if row["s to the next step"]]
    cut_off, start = "a host cut off", ("import", "build", "load", "first step")
    by_itself = [(cell, value) for cell, value in recovered if len(cell.codes) == 1 and cell.fault != cut_off]
    times = [[value for cell, value in detected if not cell.hangs]]
    hangs = [(cell, value) for cell, value in detected if cell.hangs and cell.fault != cut_off]
    times += [[value for cell, value in hangs if (cell.point in start) == is_start] for is_start in (False, True)]
    for hosts in (1, 2):
        chosen = [(cell.point in start, value) for cell, value in by_itself if cell.hosts == hosts]
        times.append([value for _, value in chosen])
        times += [[value for early, value in chosen if early == is_start] for is_start in (False, True)]
    times.append([value for cell, value in recovered if len(cell.codes) > 1])
    times.append([float(row["s to the next step"]) for row in rows_of(folder / "faults/cells-two-hosts.csv")])
    for values in times:
        late = sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
        yield [None, number(median(values), 1), number(late, 1), str(len(values))]


@table("faults-builds")
def _faults_builds(folder: Path) -> Iterator[list[str]]:
    builds = rows_of(folder / "faults/builds.csv")
    for fault in sorted({row["fault"] for row in builds}):
        yield [fault, *_same([row for row in builds if row["fault"] == fault])]
    yield ["**together**", *_same(builds)]


@table("faults-flips")
def _faults_flips(folder: Path) -> Iterator[list[str]]:
    rows = rows_of(folder / "faults/flips.csv")
    for place in dict.fromkeys(row["place"] for row in rows):
        here = [row for row in rows if row["place"] == place]
        by = Counter(row["by"] for row in here if row["by"])
        lost = [int(row["steps lost"]) for row in here if row["by"] and row["result"] != "refused"]
        unseen = [row["result"] for row in here if not row["by"]]
        found_by = ", ".join(f"{name} ({number})" for name, number in by.most_common())
        again = f"{min(lost)} to {max(lost)}" if lost else ""
        yield [place, str(len(here)), str(by.total()), found_by, again, f"{unseen.count('differs')} of {len(unseen)}"]


@table("faults-larger")
def _larger(_: Path) -> Iterator[list[str | None]]:
    """Percent of the time that failures cost, by the page's formula: D = 1 s, s = 7.54 s, one in 50,700 GPU-hours."""
    for gpus in (64, 1024, 16_384):
        between = 50_700 / gpus * 3600
        costs = [
            100 * (1 + recovery + 7.54 * (every + 1) / 2) / between
            for recovery in (30, 120, 600)
            for every in (25, 250)
        ]
        yield [f"{gpus:,}", None, *(number(cost, 3 if gpus == 64 else 2) for cost in costs)]


@table("faults-useful-time")
def _useful_time(folder: Path) -> Iterator[list[str | None]]:
    """Kills and ETTR as the command printed them; the rest from the attempts."""
    for soak in rows_of(folder / "faults/ettr.csv"):
        attempts = rows_of(folder / f"faults/ettr-{soak['every']}.csv")
        times = sorted(
            float(after["trained_from"]) - float(one["ended"])
            for one, after in pairwise(attempts)
            if one["outcome"] == "failed" and after["trained_from"]
        )
        steps = max(int(one["last_step"]) for one in attempts if one["last_step"])
        share = f"{100 * float(soak['ettr']):.1f} %"
        between = ["", ""]
        if times:
            late = times[int(0.95 * (len(times) - 1))]
            between = [f"{number(value, 2)} s" for value in (median(times), late)]
        yield [None, soak["kills"], f"{steps:,}", share, None, *between, None]


@table("operations-waiting")
def _waiting(folder: Path) -> Iterator[list[str]]:
    turns: dict[tuple[str, str], list[float]] = {}
    for row in rows_of(folder / "operations/waiting-threads.csv"):
        turns.setdefault((row["busy processes"], row["way"]), []).append(float(row["tokens per second"]))
    for (busy, way), rates in sorted(turns.items(), key=lambda one: (int(one[0][0]), -median(one[1]))):
        yield [busy, way, *(f"{rate:,.0f}" for rate in (median(rates), min(rates), max(rates)))]


@table("operations-entries")
def _entries(folder: Path) -> Iterator[list[str]]:
    """Medians of tokens/s where a program trains, else of seconds; and how many times as fast it is with the limit."""
    turns: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows_of(folder / "operations/waiting-entries.csv"):
        ways = turns.setdefault((row["busy processes"], row["program"]), {"without": [], "with": []})
        ways[row["limit"]].append(float(row["figure"]))
    for (busy, program), ways in turns.items():
        without, limited = (median(ways[way]) for way in ("without", "with"))
        trains = program.endswith("train")
        shown = [f"{figure:,.0f} tokens/s" if trains else f"{number(figure, 1)} s" for figure in (without, limited)]
        yield [busy, f"`{program}`", *shown, number(limited / without if trains else without / limited, 2)]


@table("operations-object-storage")
def _object_storage(folder: Path) -> Iterator[list[str]]:
    """A row for each way to build. Seconds and processor seconds in a bucket are multiples of a folder's."""
    rows = rows_of(folder / "operations/object-storage.csv")
    ways = ("folder", "bucket")
    taken = {
        what: [float(row["figure"]) for row in rows if row["what"] == what]
        for way in ways
        for what in (way, f"{way}, processor")
    }
    for way in ways:
        yield [None, *(f"{value:.1f} s" for one in (way, f"{way}, processor") for value in _range(taken[one]))]
    ratios = [
        [there / here for here, there in zip(taken[f"folder{end}"], taken[f"bucket{end}"], strict=True)]
        for end in ("", ", processor")
    ]
    yield [None, *(f"{value:.2f}" for one in ratios for value in _range(one))]


def _range(values: list[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


@table("scale-bucket-requests")
def _bucket_requests(folder: Path) -> Iterator[list[str]]:
    """By the folder of the files that are read; looks for the claim depend on how long a build takes."""
    codes: dict[str, dict[str, int]] = {"before": {}, "after": {}}
    for row in rows_of(folder / "scale/bucket-requests.csv"):
        if not row["files of"].endswith("claims"):
            codes[row["code"]][row["files of"]] = int(row["requests"])
    found = [*codes.values()]
    many = [name for name in found[0] if max(one[name] for one in found) > len(found[0])]
    yield from ([f"`{name}`", *(str(one[name]) for one in found)] for name in many)
    yield ["others", *(str(sum(count for name, count in one.items() if name not in many)) for one in found)]
    yield ["**all**", *(str(sum(one.values())) for one in found)]


@table("operations-requests")
def _requests(folder: Path) -> Iterator[list[str]]:
    rows = rows_of(folder / "operations/object-storage.csv")
    figures = {(row["build"], row["what"]): row["figure"] for row in rows}
    for build in ("first", "again"):
        asked = [int(figures.get((build, method), 0)) for method in ("GET", "LIST", "PUT", "DELETE")]
        yield [None, *(str(count) for count in (*asked, sum(asked)))]
