"""Cases of a parametrised test that only `make test-all` runs, or only `make soak`."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """`cases` as slow ones. A plain tuple holds the values of several parameters."""
    return _marked(pytest.mark.slow, cases)


def soak(*cases: Any) -> list[Any]:
    """The same for `make soak`: cases for which others stand in CI."""
    return _marked(pytest.mark.soak, cases)


def _marked(mark: pytest.MarkDecorator, cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=mark) for case in cases]
