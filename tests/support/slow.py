"""Cases of a parametrised test that only `make test-all` runs."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """`cases` as slow ones. A plain tuple holds the values of several parameters."""
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow) for case in cases]
