"""Tables of cases that exercise one mechanism: one test, which goes through them all and names each that fails."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize(names, cases)`, but one test instead of one a case; those marked slow are a second.

    A case has a `tmp_path` of its own, which is the current folder where the test's is, and what it patches and prints
    ends with it.
    """
    columns = [name.strip() for name in names.split(",")]
    rows: dict[str, list[dict[str, Any]]] = {"quick": [], "slow": []}
    for case in cases:
        slow = bool(getattr(case, "marks", ()))
        values = case.values if hasattr(case, "marks") else case if len(columns) > 1 else (case,)
        rows["slow" if slow else "quick"].append(dict(zip(columns, values, strict=True)))

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def through_all(subtests: pytest.Subtests, speed: str = "quick", **fixtures: Any) -> None:
            fixtures["subtests"] = subtests
            for number, values in enumerate(rows[speed]):
                shown = ", ".join(f"{name}={value!r:.100}" for name, value in values.items())
                with subtests.test(shown), _alone(number, fixtures) as own:
                    test(**{name: own[name] for name in asked}, **values)

        asked = [name for name in inspect.signature(test).parameters if name not in columns]
        speeds = [pytest.param("quick"), pytest.param("slow", marks=pytest.mark.slow)]
        speeds = [one for one in speeds if rows[str(one.values[0])]]
        added = ["subtests", "tmp_path", "speed"] if rows["slow"] else ["subtests", "tmp_path"]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys(asked + added)]
        through_all.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("speed", speeds)(through_all) if rows["slow"] else through_all

    return decorate


@contextlib.contextmanager
def _alone(number: int, fixtures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The fixtures that live as long as a function, for one case."""
    own, folder = dict(fixtures), fixtures["tmp_path"] / str(number)
    folder.mkdir()
    own["tmp_path"] = folder
    for captured in {"capsys", "capfd"} & own.keys():
        own[captured].readouterr()
    if "caplog" in own:
        own["caplog"].clear()
    inside = contextlib.chdir(folder) if Path.cwd() == folder.parent else contextlib.nullcontext()
    with inside, own["monkeypatch"].context() if "monkeypatch" in own else contextlib.nullcontext() as patch:
        yield own | ({} if patch is None else {"monkeypatch": patch})
