"""The tests that take a device, on this one: `pytest --device`."""

import os
import sys
from importlib.util import find_spec

import pytest

from tests.gpu.report import Report
from tests.gpu.runner import ROOT

FOLDERS = ("tests/pretrain",)


class _Noted:
    """Notes the outcome of each test."""

    def __init__(self, report: Report):
        self._report = report

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
            self._report.expect(name, True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._report.expect(report.nodeid, False, str(report.longrepr)[-500:])


def device_tests(report: Report) -> None:
    os.chdir(ROOT)
    options = ["-q", "-x" if report.small else "--maxfail=30", "-p", "no:cacheprovider"]
    if find_spec("xdist"):
        options += ["-p", "no:xdist"]
    where = [*FOLDERS, "--device", report.device.type, f"--basetemp={report.folder / 'pytest'}"]
    if report.small:
        where += ["-k", "loss or engine"]
        report.skip("most tests", "on a CPU they are a part of the test suite; a few show that this check works")
    code = pytest.main([*options, *where], plugins=[_Noted(report)])
    report.expect("pytest", code == 0, str(code))
    sys.stdout.flush()
