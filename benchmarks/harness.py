"""What the benchmarks share: alternating timing, medians and spreads, tables for the terminal, JSON and a page.

A benchmark is a file with one question as its docstring, a `LIMIT` that says what limits the result now, and

    def measure(options: Options) -> Iterator[Table]: ...

    if __name__ == "__main__":
        main(__doc__, measure, LIMIT)
"""

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

from data_pipeline.base.packages import version_of
from pretrain.engine.memory import keep_freed_memory
from pretrain.hardware import cpu_multiplies_bf16

ROOT = Path(__file__).parents[1]
Json = dict[str, Any]
Side = Callable[[], object]
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PACKAGES = ("torch", "deepspeed", "transformers")
_SHORTEST = 0.02  # s: shorter calls are repeated within a sample
_LONG = 1.0  # s: a call that takes longer isn't made a second time before it is measured
_LONG_ROUND, _LONGEST_ROUND = 15.0, 40.0  # s: after a longer one there is one more, or none; else three or more


@dataclass(frozen=True)
class Options:
    """`threads` of torch, one table row or more for each; each comparison takes about `seconds`, and more if three
    rounds take longer."""

    threads: tuple[int, ...]
    precisions: tuple[str, ...]
    seconds: float
    arguments: argparse.Namespace


@dataclass
class Table:
    """A table for the terminal and for a page; `data` has the samples behind it, for programs."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    data: list[Json] = field(default_factory=list)

    def add(self, *cells: object, **data: Any) -> None:
        self.rows.append([str(cell) for cell in cells])
        if data:
            self.data.append(data)

    def show(self, console: Console) -> None:
        table = RichTable(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    @property
    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Times:
    """Seconds of one side, a sample for each round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.samples) == 1:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def __str__(self) -> str:
        unit, factor = ("s", 1.0) if self.median >= 1 else ("ms", 1e3) if self.median >= 1e-3 else ("µs", 1e6)
        spread = f" ± {self.spread:.0%}" if len(self.samples) > 1 else ", once"
        return f"{self.median * factor:.3g} {unit}{spread}"


@dataclass(frozen=True)
class Comparison:
    """The times of several sides that took turns. The first side is ours."""

    times: Mapping[str, Times]

    def __getitem__(self, side: str) -> Times:
        return self.times[side]

    @property
    def ours(self) -> Times:
        return next(iter(self.times.values()))

    def ratio(self, side: str) -> float:
        """How many times as long as ours `side` takes: the median over the rounds."""
        pairs = zip(self.times[side].samples, self.ours.samples, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    @property
    def fastest_peer(self) -> str:
        return min(list(self.times)[1:], key=lambda side: self.times[side].median)

    @property
    def data(self) -> Json:
        return {"seconds": {name: list(times.samples) for name, times in self.times.items()}}


def slow(precision: str) -> bool:
    """Whether this CPU has no arithmetic for `precision`, in which PyTorch's own products then take up to seventy
    times as long as in fp32: a benchmark then gives the peer less work."""
    return precision == "bf16" and not cpu_multiplies_bf16()


def clock(threads: int) -> float:
    """Seconds: with one thread of the process, which other work on the machine disturbs less, else of the wall."""
    return time.process_time() if threads == 1 else time.perf_counter()


def compare(sides: Mapping[str, Side], options: Options, threads: int = 1, rounds: int = 15) -> Comparison:
    """Times the sides in turns, in reversed order every other round. Each side runs before, once or twice."""
    torch.set_num_threads(threads)
    repeats = {name: _repeats(side, threads) for name, side in sides.items()}
    samples: dict[str, list[float]] = {name: [] for name in sides}
    began = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
                started = clock(threads)
                for _ in range(repeats[name]):
                    sides[name]()
                samples[name].append((clock(threads) - started) / repeats[name])
            taken = time.perf_counter() - began
            least = 1 if taken > _LONGEST_ROUND else 2 if taken > _LONG_ROUND * (number + 1) else 3
            if number + 1 >= least and taken > options.seconds:
                break
    finally:
        gc.enable()
    return Comparison({name: Times(tuple(taken)) for name, taken in samples.items()})


def _repeats(side: Side, threads: int) -> int:
    started = clock(threads)
    side()
    if clock(threads) - started > _LONG:
        return 1
    started = clock(threads)
    side()
    return max(1, round(_SHORTEST / max(clock(threads) - started, 1e-7)))


def machine() -> Json:
    """What the figures depend on."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    model = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "bf16": [name for name in ("avx512_bf16", "amx_bf16") if name in flags],
        "python": platform.python_version(),
        **{name: version_of(name) for name in _PACKAGES},
    }


def arguments_of(description: str, add: Callable[[argparse.ArgumentParser], None] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", help="of torch; by default one, and two")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), nargs="+", help="by default both")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each comparison, about")
    parser.add_argument("--json", type=Path, help="a file for the tables and their samples")
    if add:
        add(parser)
    parsed = parser.parse_args()
    cores = (1,) if os.cpu_count() == 1 else (1, 2)
    return Options(tuple(parsed.threads or cores), tuple(parsed.precision or PRECISIONS), parsed.seconds, parsed)


def main(
    description: str | None,
    measure: Callable[[Options], Iterator[Table]],
    limit: str,
    add: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Prints each table as soon as it is ready; with --json, writes all of them after each."""
    assert description
    options = arguments_of(description, add)
    keep_freed_memory()
    console = Console(width=180)
    load, started, tables = os.getloadavg()[0], time.perf_counter(), []
    for table in measure(options):
        table.show(console)
        tables.append(asdict(table))
        if options.arguments.json:
            record = {
                "question": description.split("\n\n", 1)[0].replace("\n", " "),
                "notes": _notes(description),
                "limit": " ".join(limit.split()),
                "command": shlex.join(["python", *_command()]),
                "date": datetime.now(UTC).date().isoformat(),
                "machine": machine(),
                "load_before": round(load, 2),
                "seconds": round(time.perf_counter() - started),
                "tables": tables,
            }
            options.arguments.json.parent.mkdir(parents=True, exist_ok=True)
            options.arguments.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _notes(description: str) -> str:
    """The paragraphs of a docstring after the question, without the indented lines, which are commands."""
    paragraphs = description.strip().split("\n\n")[1:]
    return "\n\n".join(" ".join(part.split()) for part in paragraphs if not part.startswith("    "))


def _command() -> list[str]:
    """The command that makes the tables, without where their JSON goes."""
    given = sys.argv[1:]
    if "--json" in given:
        at = given.index("--json")
        given = given[:at] + given[at + 2 :]
    return [f"benchmarks/{Path(sys.argv[0]).name}", *given]
