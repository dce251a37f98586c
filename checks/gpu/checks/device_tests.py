"""The tests that take a device, on this one: `pytest --device`."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from checks.gpu.report import Report
from checks.gpu.runner import ROOT

FOLDER = "tests/pretrain"
_TAKES_A_DEVICE = re.compile(r"def \w+\([^)]*\bdevice\b")


class _Noted:
    """Notes the outcome of each test, and the files that can't be imported here."""

    def __init__(self, report: Report):
        self._report, self.passed = report, 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.removeprefix("tests/pretrain/")
        if report.failed:
            lines = str(report.longrepr).splitlines()
            said = [line for line in lines if line.startswith("E ")] or lines
            self._report.expect(f"{name} ({report.when})", False, "\n".join(said[:8]))
        elif report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._report.skip(name, why.removeprefix("Skipped: "))
        elif report.when == "call":
            self.passed += 1
            self._report.expect(name, True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.failed:
            return
        said = str(report.longrepr)
        if found := re.search(r"No module named '([^']*)'", said):
            self._report.skip(report.nodeid, f"{found[1]} isn't installed")
        else:
            self._report.expect(report.nodeid, False, said[-500:])


def device_tests(report: Report) -> None:
    os.chdir(ROOT)
    options = ["-q", "--continue-on-collection-errors", "--maxfail=30", "-p", "no:cacheprovider"]
    if find_spec("xdist"):
        options += ["-p", "no:xdist"]
    files = [path for path in sorted(Path(FOLDER).glob("test_*.py")) if _TAKES_A_DEVICE.search(path.read_text())]
    where = [*map(str, files), "--device", report.device.type, f"--basetemp={report.folder / 'pytest'}"]
    if report.small:
        where += ["-k", "pytorchs or newton"]
        report.skip("most tests", "on a CPU they are a part of the test suite; a few show that this check works")
    noted = _Noted(report)
    pytest.main([*options, *where], plugins=[noted])
    report.expect("tests ran", noted.passed > 0, noted.passed)
    sys.stdout.flush()
