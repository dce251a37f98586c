"""Puts what `make gpu` found into docs/results/gpu.md.

    python -m checks.results.gpu build/gpu-1.jsonl build/gpu-2.jsonl

The files replace those of the same names in docs/results/gpu. Their tables go into the page's section `TITLE`.
Afterwards `python -m checks.results` compares both as it does all pages.
"""

import argparse
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from checks.gpu.report import Json, lines_of
from checks.results.data import ROOT, number
from checks.results.pages import Rows, line_of
from checks.results.tables import Tables, register

TABLES: Tables = {}
table = partial(register, TABLES)
TITLE = "## Measured by `make gpu`"
_BEFORE = "## How the next figures are made"
_TOP = 10  # of the longest kernels of each form
_VERSIONS = {"torch": "PyTorch", "cuda": "CUDA", "triton": "Triton", "deepspeed": "DeepSpeed"}
_VERSIONS |= {"transformers": "transformers", "python": "Python"}


def _places(places: int) -> Callable[[Any], str]:
    return lambda value: value if isinstance(value, str) else number(value, places)  # NaN is a string


def _share(value: Any) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _form(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def _code(name: str) -> str:
    return f"`{name.replace('|', '/')}`"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


class Source(NamedTuple):
    """Rows of a check, as a table; `columns` by their headings, each with its key in a row and how it is printed."""

    check: str
    row: str
    columns: dict[str, tuple[str, Callable[[Any], str]]]


_SPEED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "micro-batch": ("micro_batch", str),
    "ms": ("ms", _places(1)),
    "tokens/s": ("tokens_per_second", _places(0)),
    "MFU": ("mfu_of_data_sheet", _share),
}
_TAKEN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ms": ("ms", _places(2)),
    "share": ("share", _share),
    "calls": ("calls", _places(0)),
}
SOURCES = {
    "steps": Source(
        "steps",
        "steps",
        {
            "run": ("run", _code),
            "form": ("form", str),
            **_SPEED,
            "of a large product": ("mfu_of_measured", _share),
            "peak GB": ("peak_gb", _places(1)),
            "first step, ms": ("first_steps_ms", _places(0)),
        },
    ),
    "bits": Source(
        "steps",
        "bits",
        {"against eager": ("of", str), "losses": ("losses", str), "parameters that differ": ("parameters", str)},
    ),
    "profile": Source(
        "profile",
        "profile",
        {
            "form": ("form", str),
            "ms": ("ms", _places(1)),
            "kernels, ms": ("kernels_ms", _places(1)),
            "GPU idle": ("idle_share", _share),
            "kernels": ("kernels", _places(0)),
            "launches": ("launches", _places(0)),
            "graphs": ("graph_launches", _places(0)),
            "waits": ("waits", _places(0)),
        },
    ),
    "kinds": Source("profile", "kinds", {"form": ("form", str), "kind": ("kind", str), **_TAKEN}),
    "kernels": Source("profile", "kernels", {"form": ("form", str), "kernel": ("name", _code), **_TAKEN}),
    "parts": Source("parts", "parts", {"step": ("step", str), "ms": ("ms", _places(1))}),
    "peers": Source(
        "peers",
        "peers",
        {
            "peer": ("peer", str),
            "its attention": ("attention", _code),
            "blocks": ("compiled", _form),
            **_SPEED,
            "peak GB": ("peak_gb", _places(1)),
        },
    ),
    "attention": Source(
        "attention",
        "kernels",
        {
            "attention": ("attention", str),
            "kernel": ("kernel", _code),
            "ms": ("ms", _places(3)),
            "TFLOP/s": ("tflops", _places(0)),
        },
    ),
    "flex": Source(
        "flex",
        "times",
        {
            "form": ("form", str),
            "of": ("of", str),
            "forward, ms": ("forward_ms", _places(2)),
            "both, ms": ("both_ms", _places(2)),
            "gradients repeat": ("repeats", _yes),
        },
    ),
    "launches": Source(
        "machine",
        "launches",
        {"launched by": ("by", str), "host, µs": ("host_us", _places(1)), "GPU, µs": ("us", _places(1))},
    ),
}
_CHECKS = ["check", "outcome", "held", "wrong", "skipped", "seconds"]


def _on_a_gpu(folder: Path) -> dict[str, Any]:
    """The lines of the first `make gpu`, one for each check."""
    return {line["check"]: line for line in lines_of(folder / "gpu/h100.jsonl")}


@table("gpu-checks")
def _gpu_checks(folder: Path) -> Iterator[list[str | None]]:
    for name, line in _on_a_gpu(folder).items():
        yield [f"`{name}`", None, line["outcome"], str(line["held"]), str(len(line["wrong"])), f"{line['seconds']:.0f}"]


@table("gpu-steps")
def _gpu_steps(folder: Path) -> Iterator[list[str | None]]:
    for row in _on_a_gpu(folder)["throughput"]["tables"]["steps"]:
        share = _share(row["mfu_of_data_sheet"])
        figures = f"{row['step_ms']:.0f}", f"{row['tokens_per_second']:,.0f}", share, f"{row['peak_gb']:.1f}"
        yield [row["optimizer"], _form(row["compiled"]), str(row["micro_batch"]), *figures, f"{row['launches']:,}"]


@table("gpu-generation")
def _gpu_generation(folder: Path) -> Iterator[list[str | None]]:
    for row in _on_a_gpu(folder)["generation"]["tables"]["speed"]:
        yield [row["decoding"], f"{row['tokens_per_second']:,.0f}"]


def tables(lines: list[Json]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """The name, the headings and the rows of each table that there are lines for."""
    skipped = Counter(line["check"] for line in lines if "skipped" in line)
    ends = [line for line in lines if "outcome" in line]
    yield "checks", _CHECKS, [_end(line, skipped[line["check"]]) for line in ends]
    for name, source in SOURCES.items():
        rows = [one["value"] for one in lines if one.get("row") == source.row and one["check"] == source.check]
        taken: Counter[str] = Counter()
        cells = []
        for row in rows:
            taken[row.get("form", "")] += 1
            if name != "kernels" or taken[row["form"]] <= _TOP:
                cells.append([show(row.get(key)) for key, show in source.columns.values()])
        if cells:
            yield name, [*source.columns], cells


def _end(line: Json, skipped: int) -> list[str]:
    """The row of a check, by its last line. Checks that weren't reached have no counts."""
    counts = [str(line.get("held", "")), str(len(line.get("wrong", ()))), str(skipped), f"{line.get('seconds', 0):.0f}"]
    return [f"`{line['check']}`", line["outcome"], *counts]


def computed(folder: Path) -> dict[str, Rows]:
    """The rows of each table from the files in `folder`/gpu, by what stands above it on the page."""
    lines = _lines_in(folder)
    return {f"make gpu, {name}": rows for name, _, rows in tables(lines)} if lines else {}


def _lines_in(folder: Path) -> list[Json]:
    """The lines of `make gpu` in the files in `folder`/gpu."""
    return [line for file in sorted(folder.glob("gpu/gpu-*.jsonl")) for line in lines_of(file)]


def section(lines: list[Json], when: date) -> str:
    """The section of the page: the machine, then the tables."""
    facts = {line["fact"]: line["value"] for line in lines if line.get("check") == "machine" and "fact" in line}
    versions = ", ".join(f"{name} {facts[key]}" for key, name in _VERSIONS.items() if facts.get(key))
    device = f"One {facts['gpu']}, {facts['memory_gib']:.0f} GiB" if "gpu" in facts else "No GPU: small, on a CPU"
    found = [TITLE, "", f"*{when}. {device}; {facts.get('cores', '?')} cores; {versions}.*"]
    for name, headings, rows in tables(lines):
        found += ["", f"<!-- results: make gpu, {name} -->"]
        found += [line_of(headings), "|" + "---|" * len(headings), *map(line_of, rows)]
    return "\n".join(found) + "\n\n"


def put(files: Iterable[Path], folder: Path, when: date) -> None:
    """Puts the files beside the page in `folder`, and their tables into it."""
    for file in files:
        shutil.copyfile(file, folder / "gpu" / file.name)
    page = folder / "gpu.md"
    text = re.sub(rf"(?ms)^{re.escape(TITLE)}$.*?(?=^## )", "", page.read_text(encoding="utf-8"))
    own = section(_lines_in(folder), when)
    page.write_text(text.replace(_BEFORE, own + _BEFORE), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m checks.results.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="gpu-1.jsonl, gpu-2.jsonl, gpu-3.jsonl")
    files: list[Path] = parser.parse_args().files
    for file in files:
        if not (file.match("gpu-*.jsonl") and file.is_file()):
            parser.error(f"{file}: expected a file gpu-*.jsonl, as `make gpu` writes it")
    put(files, ROOT / "docs/results", date.today())


if __name__ == "__main__":
    main()
