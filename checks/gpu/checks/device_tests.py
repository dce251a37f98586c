"""The tests that take a device, on this one: `pytest --device`."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from checks.gpu.report import Report
from checks.gpu.runner import ROOT

FOLDER = "tests/pretrain"
_TAKES_A_DEVICE = re.compile(r"def \w+\([^)]*\bdevice\b")


class _Noted:
    """Notes failed tests and those that can't be imported here."""

    def __init__(self, report: Report):
        self._report, self.passed = report, 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed:
            lines = str(report.longrepr).splitlines()
            said = [line for line in lines if line.startswith("E ")] or lines
            self._report.expect(f"{report.nodeid} ({report.when})", False, "\n".join(said[:8]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        said = str(report.longrepr) if report.failed else ""
        if found := re.search(r"No module named '([^']*)'", said):
            self._report.skip(report.nodeid, f"{found[1]} isn't installed")
        elif said:
            self._report.expect(report.nodeid, False, said[-500:])


def device_tests(report: Report) -> None:
    os.chdir(ROOT)
    options = ["-q", "--continue-on-collection-errors", "--maxfail=30", "-p", "no:cacheprovider"]
    options += ["-p", "no:xdist"] if find_spec("xdist") else []
    files = [path for path in sorted(Path(FOLDER).rglob("test_*.py")) if _TAKES_A_DEVICE.search(path.read_text())]
    where = [*map(str, files), "--device", report.device.type, f"--basetemp={report.folder / 'pytest'}"]
    if report.small:
        where += ["-k", "pytorchs or newton"]
        report.skip("most tests", "on a CPU they are a part of the test suite; a few show that this check works")
    noted = _Noted(report)
    pytest.main([*options, *where], plugins=[noted])
    report.expect("tests pass", noted.passed > 0, noted.passed)
