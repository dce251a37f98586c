"""The tables of docs/results are what the data beside them say."""

import datetime
import importlib
import json
import shutil

import pytest

from checks.results import __main__ as results
from checks.results import gpu
from checks.results.data import number, rows_of, spread
from checks.results.pages import write
from tests.support.tables import each

# neighbours, whose second cells are words of the page
DELETION = "| `deletion` | 30 % of the tokens are missing | 1.929 ± 0.012 | +0.140 | 0.48 |\n"
ROTATION = "| `rotation` | rows begin with any of their tokens | 1.994 ± 0.014 | +0.206 | 0.30 |\n"
MOVED = "`rotation` on the page, `deletion` from the data"


@pytest.fixture(scope="module")
def computed():
    return results.computed(results.FOLDER)


def test_every_page_is_what_its_data_say():
    assert results.problems(results.FOLDER) == []


@each(
    "page, figure, other, expected, is_mended",
    [
        ("bart.md", "1.712 ± 0.009", "1.713 ± 0.009", "1.713 ± 0.009 on the page, 1.712 ± 0.009 from the data", True),
        ("models.md", "GPT-2 | 3e-06", "GPT-2 | 4e-06", "4e-06 of 5.6 on the page, 3e-06 of 5.6 from the data", True),
        ("bart.md", "<!-- results: bart-noises -->\n", "", "a table without <!-- results: … --> above it", False),
        ("bart.md", "bart-noises", "bart-noise", "nothing computes 'bart-noise'", False),
        ("bart.md", "results: bart-noises", "results: measured once", "nothing computes 'measured once'", False),
        ("operations.md", "0.05 s", "0.04 s", "0.04 s on the page, 0.05 s from the data", True),  # a csv file's
        ("items.md", "typed items/runs.csv", "typed items/run.csv", "nothing computes 'items/run.csv'", False),
        ("corpus.md", "| 10.0 |", "| 11.0 |", "11.0 on the page, 10.0 from the data", True),  # a benchmark's
        ("bart.md", "| `masking` |", "| `mask` |", "`mask` on the page, `masking` from the data", True),
        ("bart.md", DELETION + ROTATION, ROTATION + DELETION, MOVED, True),
    ],
)
def test_a_changed_figure_is_named_with_its_page_and_row(page, figure, other, expected, is_mended, computed, tmp_path):
    folder = shutil.copytree(results.FOLDER, tmp_path / "results", ignore=shutil.ignore_patterns("*.png", "*.svg"))
    text = (folder / page).read_text()
    assert figure in text
    (folder / page).write_text(text.replace(figure, other, 1))
    found = results.check(folder, computed, [*results.WHOLE])
    assert any(line.startswith(page) and line.endswith(expected) for line in found)
    write(folder, computed)
    assert ((folder / page).read_text() == text) == is_mended


@each(
    "workers, per_second, work, driver, seconds",
    [
        (4, 2.0, 10.0, 6.5, 10.0),  # four turns of 2.5 s
        (13, 2.0, 2.5, 6.5, 6.5),  # one turn, and the driver takes longer to hand them out
    ],
)
def test_a_stage_takes_as_long_as_its_workers_or_the_driver(workers, per_second, work, driver, seconds):
    """13 units of 26 core-seconds together, and half a second more for each; they read 65 bytes."""
    forecast = importlib.import_module("scale_forecast")
    found = forecast.stage_time("documents", 13, 26.0, 65.0, workers, per_second, 0.5)
    assert (found.unit, found.work, found.driver, found.seconds) == (2.5, work, driver, seconds)
    assert (found.seconds_at(65.0), found.seconds_at(1.0)) == (seconds, 65.0)


def test_the_forecast_takes_the_last_measurement_of_the_driver(tmp_path):
    folder = shutil.copytree(results.FOLDER, tmp_path / "results", ignore=shutil.ignore_patterns("*.png", "*.svg"))
    with (folder / "scale/loop.csv").open("a") as file:
        file.write("0123abcd,25600,2000,0.4,0.5,0.0,1.5,0.1,2026-12-01\n")
        file.write("0123abcd,1000,9,0.4,0.5,0.0,1.5,0.1,2026-12-01\n")
    with (folder / "scale/built.csv").open("a") as file:
        file.write("0123abcd,1000,1,build,60.0,6000,9,9,9,9,9,9,0.1,2026-12-01\n")
    speeds = importlib.import_module("scale_forecast").speeds_of(folder)
    assert (speeds.units_per_second, speeds.fixed) == (2000, 0.01)


def test_the_forecast_of_c4_has_the_stages_of_its_build(computed):
    stages = {row["stage"] for row in rows_of(results.FOLDER / "scale/one-core.csv")}
    forecast = {row[0].strip("`").partition("-merged")[0] for row in computed["scale-c4"][:-1]}
    assert forecast == stages | {"tokenizer-sample"}  # which a build of 50 MB doesn't have


def test_a_value_that_is_missing_is_left_out():
    assert number(None, 3) == spread([None], 2) == ""
    assert spread([1.0, 1.2, None], 2) == "1.10 ± 0.14"


def gpu_lines() -> list[dict]:
    """As `make gpu` writes them, but for most."""
    facts = {"gpu": "NVIDIA H100", "memory_gib": 79.2, "cores": 16, "torch": "2.13.0", "cuda": "13.0", "python": "3.12"}
    step = {"run": "t5-v1.1-base-c4", "form": "graph", "micro_batch": 128, "ms": 151.2, "tokens_per_second": 529800.0}
    step |= {"mfu_of_data_sheet": 0.3641, "mfu_of_measured": 0.5062, "peak_gb": 39.16, "first_steps_ms": 41230.0}
    kernels = [{"form": "graph", "name": f"f<a|b>{one}", "ms": 1.0, "share": 0.1, "calls": 24.0} for one in range(30)]
    rows = [("steps", "steps", step), ("steps", "bits", {"of": "graph", "losses": "nan", "parameters": 0})]
    rows += [("profile", "kernels", one) for one in kernels]
    rows += [("peers", "peers", {**step, "peer": "nanoT5's form", "attention": "eager", "compiled": True})]
    ended = {"check": "steps", "outcome": "failed", "seconds": 99.7, "limit": 130, "held": 9, "wrong": {"one": 1}}
    return [
        *({"check": "machine", "fact": name, "value": value} for name, value in facts.items()),
        *({"check": check, "row": table, "value": values} for check, table, values in rows),
        {"check": "steps", "skipped": "a part", "value": "why"},
        ended,
        {"check": "peers", "outcome": "unreached", "seconds_left": 3.0},
        {"summary": {}, "device": "cuda", "seconds": 540.0},
    ]


def _section(page: str) -> str:
    return page[page.index(gpu.TITLE) :].split("\n## ")[0] + "\n"


def test_what_make_gpu_found_is_put_into_its_page(computed, tmp_path):
    """Twice, and a second call's file beside that of the first: nothing else on the page changes."""
    folder = shutil.copytree(results.FOLDER, tmp_path / "results", ignore=shutil.ignore_patterns("*.png", "*.svg"))
    before = (folder / "gpu.md").read_text()
    for name, lines in (("gpu-1", gpu_lines()), ("gpu-2", gpu_lines()[:1]), ("gpu-1", gpu_lines())):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"check": "cut o')
        gpu.put([tmp_path / f"{name}.jsonl"], folder, datetime.date(2026, 12, 1))
    page = (folder / "gpu.md").read_text()
    own = _section(page)
    assert page.replace(own, "") == before.replace(_section(before), "")
    assert page.count(gpu.TITLE) == 1
    machine = "One NVIDIA H100, 79 GiB; 16 cores; PyTorch 2.13.0, CUDA 13.0, Python 3.12."
    assert f"*2026-12-01. {machine}*\n\n<!-- results: make gpu, checks -->\n" in own
    expected = [
        "| `steps` | failed | 9 | 1 | 1 | 100 |",
        "| `peers` | unreached | | 0 | 0 | 0 |",
        "| `t5-v1.1-base-c4` | graph | 128 | 151.2 | 529,800 | 36.4 % | 50.6 % | 39.2 | 41,230 |",
        "| graph | nan | 0 |",
        "| nanoT5's form | `eager` | compiled | 128 | 151.2 | 529,800 | 36.4 % | 39.2 |",
    ]
    assert [line for line in own.splitlines() if line in expected] == expected
    assert own.count("| graph | `f<a/b>") == 10  # the longest
    others = {name: rows for name, rows in computed.items() if not name.startswith("make gpu")}
    found = results.check(folder, {**others, **gpu.computed(folder)}, [*results.WHOLE])
    assert found == []
    (folder / "gpu.md").write_text(page.replace("39.2 | 41,230", "39.3 | 41,230"))
    assert any("39.2 from the data" in line for line in results.check(folder, gpu.computed(folder), [*results.WHOLE]))
