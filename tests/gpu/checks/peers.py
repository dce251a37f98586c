"""The benchmarks that compare this project with others on a GPU, shortened."""

import json
import subprocess
import sys

from tests.gpu.report import Report
from tests.gpu.runner import ROOT

BENCHMARKS = ("training_step.py",)
SECONDS = "3"  # of each comparison


def peers(report: Report) -> None:
    for name in BENCHMARKS:
        path = ROOT / "benchmarks" / name
        if not path.exists():
            report.skip(name, "this version has no such benchmark")
        elif not report.cuda:
            report.skip(name, "no GPU: `make bench` compares on a CPU")
        else:
            with report.part(name):
                _run(report, path.name)


def _run(report: Report, name: str) -> None:
    out = report.folder / f"{name}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--device", "cuda", "--seconds", SECONDS]
    done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, check=False)
    report.expect(f"{name} ends", done.returncode == 0, done.returncode)
    for table in json.loads(out.read_text())["tables"]:
        for cells in table["rows"]:
            report.row(f"{name}: {table['title']}", **dict(zip(table["columns"], cells, strict=True)))
