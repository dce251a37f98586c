"""Numbers that JSON lacks are strings in everything that other programs read."""

import contextlib
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_pipeline.base.atomic import strict_json
from pretrain.evaluate import record
from pretrain.evaluate.hook import EvalResult
from pretrain.run.world import World
from pretrain.tools import evaluate

SPOILT = {"loss": 2.5, "nothing": math.nan, "all": math.inf, "none": -math.inf}
WRITTEN = {"loss": 2.5, "nothing": "NaN", "all": "Infinity", "none": "-Infinity"}


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for NaN and infinity, which Python's parser would accept."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_lacks_are_strings_that_float_reads_back():
    value = {"rows": [SPOILT, (1, math.nan)], "number": np.float64("nan"), "text": "NaN", "on": True, "none": None}
    written = {"rows": [WRITTEN, [1, "NaN"]], "number": "NaN", "text": "NaN", "on": True, "none": None}
    assert parsed(json.dumps(strict_json(value))) == written
    assert [float(one) for one in WRITTEN.values()] == pytest.approx(list(SPOILT.values()), nan_ok=True)


def test_a_table_of_an_evaluation_is_json(tmp_path):
    record.keep(tmp_path, 4, EvalResult(tables={"norms": [SPOILT]}))
    table = parsed((tmp_path / "norms.json").read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True)) == {"step": 4, **WRITTEN}


def test_evaluate_prints_json(tmp_path, monkeypatch, capsys):
    """The metrics of hooks, and those of tasks, whose results also go to a file."""
    session = SimpleNamespace(
        world=World.on_this_node(), config=None, trained=SimpleNamespace(model=None), held_out=lambda _: None
    )
    session.prompt_format = lambda _: SimpleNamespace(form="none")
    session.evaluation = lambda _: None
    monkeypatch.setattr(evaluate, "opened_checkpoint", lambda *_: contextlib.nullcontext(session))
    monkeypatch.setattr(evaluate, "selected_hooks", lambda *_: [])
    monkeypatch.setattr(evaluate, "_corpora", lambda *_: {})
    monkeypatch.setattr(evaluate, "Standalone", lambda _: None)
    monkeypatch.setattr(evaluate.checkpoint_index, "read", lambda _: SimpleNamespace(step=1))
    runner = SimpleNamespace(after=lambda *_, last: [EvalResult(SPOILT)])
    monkeypatch.setattr(evaluate, "HookRunner", lambda *_, **__: runner)
    evaluate.evaluate(tmp_path, [], as_json=True)
    assert parsed(capsys.readouterr().out) == WRITTEN
    monkeypatch.setattr(evaluate, "LmEvalRequests", lambda *_: None)
    monkeypatch.setattr(evaluate, "run_tasks", lambda *_: (EvalResult(SPOILT), {"results": {"sky": SPOILT}}))
    evaluate.evaluate_on_tasks(tmp_path, SimpleNamespace(), out=tmp_path, as_json=True)
    assert parsed(capsys.readouterr().out) == WRITTEN
    assert parsed((tmp_path / "lm_eval.json").read_text()) == {"results": {"sky": WRITTEN}}
