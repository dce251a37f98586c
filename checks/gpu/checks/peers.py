"""The benchmarks that compare this project with others on a GPU, shortened."""

import json
import subprocess
import sys

from checks.gpu.report import Report
from checks.gpu.runner import ROOT

NEAR = 0.95  # of the peer's speed: times vary
SECONDS = "3"  # of each comparison
BENCHMARKS = ("training_step.py", "attention_forms.py", "generation.py")


def peers(report: Report) -> None:
    for name in BENCHMARKS:
        if not report.cuda:
            report.skip(name, "no GPU: `make bench` compares on a CPU")
        else:
            with report.part(name):
                _run(report, name)


def _run(report: Report, name: str) -> None:
    tables = report.folder / f"{name}.json"
    options = ["--device", "cuda", "--seconds", SECONDS, "--json", str(tables)]
    command = [sys.executable, str(ROOT / "benchmarks" / name), *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    report.expect(f"{name} ends", done.returncode == 0, done.returncode)
    for table in json.loads(tables.read_text())["tables"] if tables.exists() else ():
        for row in table["rows"]:
            cells = dict(zip(table["columns"], row, strict=True))
            report.row(f"{name}: {table['title']}", **cells)
            if cells.get("ratio", "").replace(".", "", 1).isdigit():  # else it ran out of memory
                report.expect(f"{name}: {table['title']}: as fast as the peer", float(cells["ratio"]) >= NEAR, cells)
