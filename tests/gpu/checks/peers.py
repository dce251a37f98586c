"""The benchmarks that compare this project with others on a GPU, shortened."""

import json
import subprocess
import sys

from tests.gpu.report import Json, Report
from tests.gpu.runner import ROOT

SECONDS = "3"  # of each comparison
# Those with options write their tables to a file; the other prints its rows.
BENCHMARKS = {
    "training_step.py": ["--device", "cuda", "--seconds", SECONDS],
    "attention_with_bias.py": [],
    "generation.py": ["--device", "cuda", "--seconds", SECONDS],
}


def peers(report: Report) -> None:
    for name, options in BENCHMARKS.items():
        if not (ROOT / "benchmarks" / name).exists():
            report.skip(name, "this version has no such benchmark")
        elif not report.cuda:
            report.skip(name, "no GPU: `make bench` compares on a CPU")
        else:
            with report.part(name):
                _run(report, name, options)


def _run(report: Report, name: str, options: list[str]) -> None:
    tables = report.folder / f"{name}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / name), *options, *(["--json", str(tables)] if options else [])]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    report.expect(f"{name} ends", done.returncode == 0, done.returncode)
    rows: dict[str, list[Json]] = {name: [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]}
    if tables.exists():
        for table in json.loads(tables.read_text())["tables"]:
            cells = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
            rows[f"{name}: {table['title']}"] = cells
    for title, found in rows.items():
        for row in found:
            report.row(title, **row)
