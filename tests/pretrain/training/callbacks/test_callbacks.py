"""The callbacks of a run: those of the page, a run without each of the built-in ones, and what is refused."""

import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from pretrain.config import RunConfig
from pretrain.config.run_config import CallbackSection
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.ranks import joined_world
from pretrain.run.metrics_file import read_metrics
from pretrain.run.world import World
from pretrain.training import callback, callbacks
from pretrain.training.tracking.mlflow_store import TrackedRun
from pretrain.training.tracking.tracker import Tracker
from tests.support.rank_processes import each as each_in_turn
from tests.support.rank_processes import on_ranks
from tests.support.runs import install_page, run_file, train_ranks
from tests.support.tables import each


def test_the_callbacks_of_the_page_run_and_one_stops_the_run(small_corpus, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callbacks = install_page("how-to/write-a-callback", tmp_path, monkeypatch)["callbacks"]
    callbacks[1]["target"] = 1e9  # at once: the second step is the last
    path = run_file(tmp_path, small_corpus, callbacks=callbacks)
    monkeypatch.syspath_prepend(tmp_path)  # the ranks have the paths of this process
    assert train_ranks(path, 2) == [75, 75]
    rows = {row.step: row.metrics for row in read_metrics(tmp_path / "run")}
    saved = checkpoint_index.read(tmp_path / "run/checkpoints/step-00000002")
    ((name, state),) = saved.train_state.callbacks.items()
    assert name == "my_package.callback:Patience"
    assert state["average"] == pytest.approx(rows[2]["train/average_loss"])
    assert rows[1]["train/most_rows"] == 4  # batch.micro_batch_size of `run_file`
    assert 0 <= rows[1]["train/ignored_labels"] < 1
    assert state["average"] == pytest.approx(0.9 * rows[1]["train/loss"] + 0.1 * rows[2]["train/loss"])
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    written = {event.step: event.value for event in events.Scalars("train/loss")}
    assert written == {step: pytest.approx(row["train/loss"]) for step, row in rows.items() if "train/loss" in row}
    callbacks[1]["target"] = 0.0
    path = run_file(tmp_path, small_corpus, callbacks=callbacks)
    assert train_ranks(path, 2) == [0, 0]
    again = {row.step: row.metrics for row in read_metrics(tmp_path / "run") if "train/loss" in row.metrics}
    assert again[3]["train/average_loss"] == pytest.approx(0.9 * state["average"] + 0.1 * again[3]["train/loss"])
    (evaluated,) = [row for row in read_metrics(tmp_path / "run") if "validation/small/loss" in row.metrics]
    (event,) = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload().Scalars("validation/small/loss")
    assert (event.step, event.value) == (8, pytest.approx(evaluated.metrics["validation/small/loss"]))


def test_skipped_steps_leave_the_average_of_the_page_as_it_was(tmp_path, monkeypatch):
    """The first step and the third are skipped: 4, and 0.9 · 4 + 0.1 · 2 = 3.8."""
    install_page("how-to/write-a-callback", tmp_path, monkeypatch)
    patience = runpy.run_path(str(tmp_path / "my_package/callback.py"))["Patience"](target=3.0)
    patience.load_state_dict({})
    found = []
    for loss, applied in ((math.nan, False), (4.0, True), (math.nan, False), (2.0, True)):
        patience.after_step(None, SimpleNamespace(loss=loss, applied=applied))
        found.append(patience.metrics(None).get("train/average_loss"))
    assert found == [None, 4.0, 4.0, pytest.approx(3.8)]


def test_runs_of_one_name_have_their_own_ids_at_weights_and_biases(tmp_path, monkeypatch):
    """All attempts of a run have one id. A step that is taken again is logged again, under the metric `step`, since
    W&B drops what comes before its own last step. The module here only records what the page's code gives wandb."""
    ids, axes, logged = [], set(), []

    def init(**settings):
        ids.append(settings["id"])
        return SimpleNamespace(define_metric=lambda name, step_metric: axes.add((name, step_metric)), log=logged.append)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    install_page("how-to/write-a-callback", tmp_path, monkeypatch)
    page = runpy.run_path(str(tmp_path / "my_package/wandb_callback.py"))
    config = SimpleNamespace(run=SimpleNamespace(name="t5"))
    for attempt, name in ((1, "here"), (2, "here"), (1, "there")):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        Tracker(directory, TrackedRun("c4", config.run.name, attempt), None).close("KILLED")
        run = SimpleNamespace(world=World.on_this_node(), config=config, directory=directory)
        wandb = page["WandB"](project="c4")
        wandb.before_training(SimpleNamespace(run=run))
        wandb.after_log(SimpleNamespace(step=3), {"train/loss": 2.0})
    assert ids[0] == ids[1] != ids[2]
    assert axes == {("*", "step")}
    assert logged == [{"step": 3, "train/loss": 2.0}] * 3


def losses_without(name, path):
    """The exit code and the losses of a run on the rank that has joined, without one of the built-in callbacks."""
    from pretrain.training.run import train_in_group

    losses = []

    class Losses(callback.Callback):
        def after_step(self, trainer, result):
            losses.append(result.loss)

    every = callbacks.build_callbacks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            callbacks,
            "build_callbacks",
            lambda *given: {key: made for key, made in every(*given).items() if key != name},
        )
        config = load(path, [], RunConfig)
        Path(config.run.directory).mkdir()
        return train_in_group(joined_world(), config, callbacks=[Losses()]), losses


def test_a_run_without_any_one_of_them_trains_the_same(small_corpus, tmp_path):
    names = list(callbacks.build_callbacks(load(run_file(tmp_path, small_corpus), [], RunConfig)))
    assert len(names) == 7
    often = {"run": {"max_steps": 4}, "checkpoint": {"every_steps": 2}}
    runs = [(name, run_file(tmp_path / str(name), small_corpus, **often)) for name in (None, *names)]
    ((whole, *others),) = on_ranks(1, each_in_turn, losses_without, runs)
    assert whole[0] == 0
    assert len(whole[1]) == 4
    for name, without in zip(names, others, strict=True):
        assert without == whole, name


@each(
    "name, options, said",
    [
        ("json:JSONDecoder", {"wrong": 1}, "json:JSONDecoder can't be made: TypeError"),
        ("json:JSONDecoder", {}, "json:JSONDecoder is no subclass of pretrain.training.callback.Callback"),
        ("no_such:Thing", {}, "no_such:Thing can't be made: ModuleNotFoundError"),
    ],
)
def test_what_is_no_callback_is_refused_in_a_line(name, options, said):
    with pytest.raises(UserError, match=re.escape(f"callbacks.0: {said}")):
        callbacks.users_callbacks([CallbackSection(name=name, **options)])
