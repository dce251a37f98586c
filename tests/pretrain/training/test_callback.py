"""Callbacks: the order in which they are called, and how they end."""

import contextlib
import faulthandler
import sys
from pathlib import Path
from typing import Any

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError
from pretrain.config import RunConfig
from pretrain.training.callback import Callback
from pretrain.training.callbacks import build_callbacks
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file
from tests.support.small_runs import run_config
from tests.support.tables import each


class Usual(Callback):
    """A callback that doesn't say when it is called."""


class Earlier(Callback):
    priority = 45


class Latest(Callback):
    priority = -60


def test_callbacks_are_called_by_priority_and_then_in_the_order_of_the_run_file():
    names = [f"{__name__}:{kind.__name__}" for kind in (Latest, Usual, Earlier)]
    config = run_config(
        callbacks=[{"name": name} for name in names],
        data={"train": [{"corpus": "none"}], "validation": [{"corpus": "none"}]},
        evaluation=[{"hook": "validation_loss", "every_steps": 8}],
        faults={"spikes": {}},
        trainer={"profile": True},
    )
    latest, usual, earlier = names
    found = build_callbacks(config, None, [Usual()])
    assert list(found) == [
        "SkippedSteps",
        earlier,
        "Spikes",
        "Speed",
        "Profiling",
        usual,
        f"{usual} 3",
        "Reporting",
        "EvaluationHooks",
        "Checkpointing",
        "Stops",
        latest,
    ]
    priorities = [callback.priority for callback in found.values()]
    assert priorities == sorted(priorities, reverse=True)


class Noted(Callback):
    """Notes its calls, and fails in one of them."""

    def __init__(self, name: str, calls: list[str], fails_in: str = ""):
        self._name, self._calls, self._fails_in = name, calls, fails_in

    def _called(self, method: str) -> None:
        self._calls.append(f"{self._name} {method}")
        if method == self._fails_in:
            raise FailedError(f"{self._name} fails in {method}")

    def before_training(self, trainer: Any) -> None:
        self._called("before_training")

    def after_step(self, trainer: Any, result: Any) -> None:
        self._called("after_step")

    def after_training(self, trainer: Any) -> None:
        self._called("after_training")

    def close(self, trainer: Any) -> None:
        self._called("close")


def ended(path: Path, fails_in: list[str]) -> tuple[int | str, list[str], str]:
    """The exit code or the error of a run of one step with two callbacks that fail in these methods; their calls; and
    what the run warns of."""
    from pretrain.training.run import train

    calls: list[str] = []
    noted = [Noted(name, calls, method) for name, method in zip("ab", fails_in, strict=True)]
    told = path.with_name("stderr")  # a file, since a run has faulthandler write to stderr
    with told.open("w") as printed, contextlib.redirect_stderr(printed):
        try:
            end: int | str = train(load(path, [], RunConfig), callbacks=noted)
        except FailedError as error:
            end = str(error)
        faulthandler.enable(sys.__stderr__)
    warnings = [line for line in told.read_text().splitlines() if "can't be closed" in line]
    return end, calls, "\n".join(warnings)


SET_UP = ["a before_training", "b before_training"]
STEP = ["a after_step", "b after_step"]
CLOSED = ["a close", "b close"]


@each(
    "fails_in, end, calls, warned",
    [
        (["", ""], 0, [*SET_UP, *STEP, "a after_training", "b after_training", *CLOSED], ""),
        (["", "before_training"], "b fails in before_training", [*SET_UP, "a close"], ""),
        (["after_step", ""], "a fails in after_step", [*SET_UP, "a after_step", *CLOSED], ""),
        (
            ["close", "after_training"],
            "b fails in after_training",
            [*SET_UP, *STEP, "a after_training", "b after_training", *CLOSED],
            f"warning: {__name__}:Noted can't be closed: a fails in close",
        ),
    ],
)
def test_what_was_set_up_is_closed_however_the_run_ends(small_corpus, tmp_path, fails_in, end, calls, warned):
    """An error in `close` is a warning: neither the other callbacks nor the end of the run notice it."""
    path = run_file(tmp_path, small_corpus, run={"max_steps": 1}, evaluation=[])
    assert on_ranks(1, ended, path, fails_in, joined=False) == [(end, calls, warned)]
