"""Callbacks: the page's own two, each built-in one left out, what checkpoints keep of them, and their errors."""

import json
import re
from pathlib import Path

import pytest

from data_pipeline.foundation.errors import UserError
from pretrain.checkpoint import index as checkpoint_index
from pretrain.config.run_config import CallbackSection
from pretrain.run.metrics_file import read_metrics
from pretrain.trainer.loop import users_callbacks
from tests.conftest import run as run_command
from tests.conftest import write_corpus_file
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.runs import MODEL, install_page, losses, run_file
from tests.tables import each


def test_the_callbacks_of_the_page_run_and_one_stops_the_run(small_corpus, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callbacks = install_page("write-a-callback", tmp_path, monkeypatch)["callbacks"]
    callbacks[1]["target"] = 1e9  # at once: the second step is the last
    path = run_file(tmp_path, small_corpus, callbacks=callbacks)
    assert run_command("launch", "local", path, "--ranks", "2").returncode == 75
    rows = {row.step: row.metrics for row in read_metrics(tmp_path / "run")}
    saved = checkpoint_index.read(tmp_path / "run/checkpoints/step-00000002")
    ((name, state),) = saved.callbacks.items()
    assert name == "my_package.callback:Patience"
    assert state["average"] == pytest.approx(rows[2]["train/average_loss"])
    assert state["average"] == pytest.approx(0.9 * rows[1]["train/loss"] + 0.1 * rows[2]["train/loss"])
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    written = {event.step: event.value for event in events.Scalars("train/loss")}
    assert written == {step: pytest.approx(row["train/loss"]) for step, row in rows.items() if "train/loss" in row}
    callbacks[1]["target"] = 0.0
    path = run_file(tmp_path, small_corpus, callbacks=callbacks)
    assert run_command("launch", "local", path, "--ranks", "2").returncode == 0
    again = {row.step: row.metrics for row in read_metrics(tmp_path / "run") if "train/loss" in row.metrics}
    assert again[3]["train/average_loss"] == pytest.approx(0.9 * state["average"] + 0.1 * again[3]["train/loss"])


def losses_without(name, path):
    from data_pipeline.foundation.config_file import load
    from pretrain.config import RunConfig
    from pretrain.trainer import callback, loop
    from pretrain.trainer.train import train

    losses = []

    class Losses(callback.Callback):
        def after_step(self, trainer):
            losses.append(trainer.outcome.loss)

    every = loop.build_callbacks
    loop.build_callbacks = lambda *given: {
        **{key: made for key, made in every(*given).items() if key != name},
        "Losses": Losses(),
    }
    config = load(path, [], RunConfig)
    Path(config.run.directory).mkdir()
    return train(config), losses


def test_a_run_without_any_one_of_them_trains_the_same(small_corpus, tmp_path):
    from pretrain.trainer import loop
    from pretrain.trainer.callbacks.stops import Stops

    (whole,) = on_ranks(1, losses_without, None, run_file(tmp_path / "whole", small_corpus), joined=False)
    assert whole[0] == 0
    assert len(whole[1]) > 2
    names = [callback.__name__ for callback in (*loop.FIRST, *loop.LAST, Stops)]
    assert len(names) == 12
    for name in names:
        (without,) = on_ranks(1, losses_without, name, run_file(tmp_path / name, small_corpus), joined=False)
        assert without == whole, name


def test_the_profile_of_some_steps_is_a_trace(small_corpus, tmp_path):
    path = run_file(tmp_path, small_corpus, run={"max_steps": 11}, trainer={"profile": True})
    assert run_command("launch", "local", path, "--ranks", "2").returncode == 0
    for rank in range(2):
        trace = json.loads((tmp_path / f"run/profile/rank-{rank:05d}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"aten::mm", "aten::embedding"} <= names


@each(
    "name, options, said",
    [
        ("json:JSONDecoder", {"wrong": 1}, "json:JSONDecoder can't be made: TypeError"),
        ("json:JSONDecoder", {}, "json:JSONDecoder is no subclass of pretrain.trainer.callback.Callback"),
    ],
)
def test_what_is_no_callback_is_refused_in_a_line(name, options, said):
    with pytest.raises(UserError, match=re.escape(f"callbacks.0: {said}")):
        users_callbacks([CallbackSection(name=name, **options)])


def test_a_run_with_one_that_is_not_there_is_refused_once(small_corpus, tmp_path):
    path = run_file(tmp_path, small_corpus, callbacks=[{"name": "no_such:Thing"}], faults={"restarts": 3})
    done = run_command("launch", "local", path, "--ranks", "2")
    assert done.returncode == 2
    assert "starting attempt 2" not in done.stderr
    assert "error: callbacks.0: no_such:Thing can't be made: ModuleNotFoundError" in done.stdout + done.stderr


# A package that offers an objective, a source, a rule, a step and a family


LINES = [f"{number} Lines of Words, in a Row" for number in range(200)]
FORTUNES = ["The River runs to the Sea", "HASTE MAKES WASTE", "Anna sings in Ulm", *LINES, f"{LINES[7]} again"]


def test_an_objective_a_source_a_rule_a_step_and_a_family_of_a_package_train(small_corpus, tmp_path, monkeypatch):
    settings = install_page("extend", tmp_path, monkeypatch)
    (tmp_path / "fortunes.txt").write_text("\n%\n".join(FORTUNES))
    settings["sources"][0]["path"] = str(tmp_path / "fortunes.txt")
    tokenizer = {"path": str(small_corpus / "tokenizer/spiece.model"), "sentinels": 40}
    split = {"by": "position", "validation_fraction": 0.1}
    output = {"output": str(tmp_path / "corpus")}
    path = write_corpus_file(tmp_path / "corpus.yaml", **settings, tokenizer=tokenizer, split=split, **output)
    done = run_command("data-pipeline", "build", path)
    assert done.returncode == 0, done.stderr
    dropped = json.loads((tmp_path / "corpus/report.json").read_text())["documents"]["dropped"]
    assert dropped == {"shouting": 1, "same_opening": 1}
    run = run_file(tmp_path / "run", tmp_path / "corpus", model={**MODEL, "family": "tempered"})
    done = run_command("pretrain", "train", run)
    assert done.returncode == 0, done.stderr
    assert len(losses(run)) == 8
