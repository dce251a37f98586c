"""Runs in trouble, with non-finite gradients or losses that jump, and runs whose batches grow."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError
from data_pipeline.corpus import Corpus, open_corpus
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.loading.stream import Stream
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint import tensors
from pretrain.engine.ranks import joined_world
from pretrain.run import train_state, watchdog
from pretrain.run.metrics_file import read_metrics, rows_from
from pretrain.run.train_state import Rewind, add_rewind
from pretrain.training import prepare
from pretrain.training.callback import Callback, StepResult
from pretrain.training.callbacks import bad_steps
from pretrain.training.trainer import Trainer
from tests.support.rank_processes import on_ranks
from tests.support.recorded import digests, scheduled_rows
from tests.support.runs import losses, run_file

ROWS = 16
HUGE = 1e30
LONG_SPANS = SpanCorruption(inputs_length=22, noise_density=0.5, mean_span_length=5.0)  # of as long rows


def settings(folder: Path, corpus: Path, steps: int, **changes: Any) -> RunConfig:
    """Of runs with batches of `ROWS` rows."""
    plain = {"schedule": {"name": "constant"}, "optimizer": {"name": "adamw", "learning_rate": 1e-4}, "evaluation": []}
    return load(run_file(folder, corpus, run={"max_steps": steps}, **plain, **changes), [], RunConfig)


def train_with(
    config: RunConfig,
    spoil: Any = None,
    stop: int | None = None,
    huge: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Any:
    """Trains a run whose losses are `spoil(loss, position of the rank's first row in the step)`.

    After step `huge`, a weight of each parameter is huge on all ranks, as after a wrong update.

    Returns the exit code or error, and the row digests of each step in the order they were taken.
    """
    from pretrain.engine.engine import Engine
    from pretrain.training.run import train_in_group

    take_step, taken = Engine.step, []

    def step(engine: Any, step: int, row_offsets: list[int], batches: list, *arguments: Any) -> Any:
        taken.append((step, [digest for batch in batches for digest in digests(batch)]))
        with engine.deepspeed.module.register_forward_hook(
            lambda _, __, losses: {
                name: spoil(loss, row_offsets[0]) if spoil else loss for name, loss in losses.items()
            }
        ):
            outcome = take_step(engine, step, row_offsets, batches, *arguments)
        if step + 1 == huge:
            make_huge(engine.deepspeed)
        return outcome

    Engine.step = step
    try:
        return train_in_group(joined_world(), config, stop, callbacks=callbacks), taken
    except FailedError as error:
        return str(error), taken
    finally:
        Engine.step = take_step


def make_huge(engine: Any) -> None:
    """Sets the first weight of each parameter, where the model computes with it and in the optimizer's fp32 weights."""
    from pretrain.engine.deepspeed_private import fragments

    for parameter in engine.module.parameters():
        parameter.data.view(-1)[0] = HUGE
    for fragment in fragments(engine):
        if fragment.start == 0:
            fragment.view(fragment.buffer.data)[0] = HUGE


class Counting(Callback):
    """Counts its steps, and sets itself up before training."""

    def before_training(self, trainer: Trainer) -> None:
        self.steps, self.calls = 0, ["before_training"]

    def after_load(self, trainer: Trainer, checkpoint: Path) -> None:
        self.calls.append("after_load")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.steps = state.get("steps", 0)

    def before_steps(self, trainer: Trainer) -> None:
        self.calls.append("before_steps")

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "calls": self.calls}

    def metrics(self, trainer: Trainer) -> dict[str, float]:
        return {"mine/steps": self.steps}


class Sees(Callback):
    """Keeps the steps that it sees, and whether the run is going back after them."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.seen.append((result.step, bool(trainer.rewinding)))


class SeesFirst(Sees):
    priority = 100


class SeesLast(Sees):
    """Asks for a stop, on rank 1 alone, in the step after which the run goes back."""

    priority = -100

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        super().after_step(trainer, result)
        if trainer.rewinding and dist.get_rank() == 1:
            trainer.stop()


@contextlib.contextmanager
def verifying() -> Iterator[list[bool]]:
    """Yields a list that gets, for each search for a checkpoint to rewind to, whether the limit of a start holds."""
    found: list[bool] = []

    def newest_verified(run: Path, before: int | None = None) -> Path | None:
        found.append("starting" in watchdog._rank.phases)
        return tensors.newest_verified(run, before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bad_steps, "newest_verified", newest_verified)
        yield found


def in_trouble(folder: Path, corpus: Path) -> dict[str, Any]:
    def spike_at(first: int, last: int) -> Any:
        return lambda loss, position: loss + 5.0 * (first <= position < last)  # rows that come at steps 12, …

    spikes = {"window": 8, "threshold": 8.0, "action": "rewind", "max_rewinds": 2}
    command = f'echo "$ALERT_EVENT $ALERT_TEXT" >> {folder}/alerts'
    tracking = {"mlflow": None, "log_every_steps": 1}
    alerts = [{"name": "alerts:Alerts", "command": command, "events": ["spike"]}]
    spiking = settings(folder / "spiking", corpus, 16, faults={"spikes": spikes}, tracking=tracking, callbacks=alerts)
    counting = [{"name": f"{__name__}:Counting"}]
    stopping = settings(folder / "stopping", corpus, 16, faults={"spikes": spikes}, callbacks=counting)
    requested = settings(folder / "requested", corpus, 16, faults={"spikes": spikes})
    first, last = SeesFirst(), SeesLast()
    hopeless = settings(folder / "hopeless", corpus, 16, faults={"spikes": spikes})
    ramp = [{"until_step": 2, "global_batch_size": 8}, {"until_step": 3, "global_batch_size": 8 * 2}]
    batch = {"global_batch_size": 32, "micro_batch_size": 4, "ramp_up": ramp}
    data = {"train": [{"corpus": str(corpus)}], "lanes": 8, "workers": 0}
    data["curriculum"] = [{"until_step": 5, "objective": LONG_SPANS.model_dump(mode="json")}]
    growing = settings(folder / "growing", corpus, 6, batch=batch, data=data)
    less = growing.model_copy(update={"batch": growing.batch.model_copy(update={"global_batch_size": 24})})
    with verifying() as verified:
        rewound = train_with(spiking, spike_at(192, 208))
    return {
        "spiking": rewound,
        "verified": verified,
        "stopping": train_with(stopping, spike_at(192, 208), stop=13),
        "stopped": train_with(stopping, spike_at(192, 208)),
        "requested": train_with(requested, spike_at(192, 208), callbacks=[last, first]),
        "seen": (first.seen, last.seen),
        "hopeless": train_with(hopeless, spike_at(192, 10**9)),
        "growing": train_with(growing, stop=3),
        "grown": train_with(less),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trouble")


@pytest.fixture(scope="module")
def told(folder, small_corpus) -> list[dict[str, Any]]:
    """The records of each of two ranks."""
    return on_ranks(2, in_trouble, folder, small_corpus)


@pytest.fixture(scope="module")
def schedule(small_corpus) -> list[list[str]]:
    """The digests of the rows of each step of 16 rows."""
    return scheduled(open_corpus(small_corpus))


def scheduled(corpus: Corpus) -> list[list[str]]:
    return list(scheduled_rows(Stream([corpus], [1.0], 0, 8), ROWS, 24).values())


def taken_by_both(found: list[tuple[Any, list[tuple[int, list[str]]]]]) -> list[tuple[int, list[str]]]:
    """The step and the rows of both ranks, in the order in which steps were taken, of results of `train_with`."""
    ours, theirs = (taken for _, taken in found)
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    return [(step, rows + others) for (step, rows), (_, others) in zip(ours, theirs, strict=True)]


EVERY_4TH = {"every_steps": 4, "keep_last": 9}


def poison(loss: Any, position: int) -> Any:
    return loss * (float("nan") if position >= 96 else 1)


@pytest.mark.slow
def test_too_many_steps_without_a_finite_gradient_end_the_run(folder, small_corpus, schedule):
    """The trouble begins with step 7. No finite loss came from the state after step 6: the run resumes from step 4."""
    faults = {"max_skipped_steps": 3}
    run = settings(folder / "poisoned", small_corpus, 12, faults=faults, checkpoint=EVERY_4TH)
    for error, taken in on_ranks(2, train_with, run, poison):
        assert "step 9: the loss or its gradient isn't finite" in error
        assert "3 steps in a row (faults.max_skipped_steps)" in error
        assert len(taken) == 9
    healed = on_ranks(2, train_with, run)
    assert [code for code, _ in healed] == [0, 0]
    assert taken_by_both(healed) == [(step, schedule[step]) for step in range(4, 12)]
    rows = {row.step: row for row in read_metrics(folder / "poisoned/run")}
    assert rows[12].metrics["train/skipped_steps"] == 0


@pytest.mark.slow
def test_a_state_from_which_no_loss_is_finite_is_neither_the_latest_nor_trained_from(folder, small_corpus, schedule):
    """Weights are huge after step 8, whose checkpoint is finite and whole. `latest` keeps naming that of step 4. Where
    it names step 8 all the same, three steps show it, and the run goes back."""
    faults, checkpoints = {"max_skipped_steps": 4}, folder / "huge/run/checkpoints"
    run = settings(folder / "huge", small_corpus, 13, faults=faults, checkpoint=EVERY_4TH)
    failed = on_ranks(2, train_with, run, None, None, 8)
    assert all("for 4 steps in a row" in error for error, _ in failed)
    assert taken_by_both(failed) == [(step, schedule[step]) for step in range(12)]
    assert (checkpoints / "latest").read_text() == "step-00000004\n"
    (checkpoints / "latest").write_text("step-00000008\n")  # as if it had been moved there
    repaired = on_ranks(2, train_with, run)
    assert [code for code, _ in repaired] == [0, 0]
    assert taken_by_both(repaired) == [(step, schedule[step]) for step in (8, 9, 10, *range(4, 13))]
    assert (checkpoints / "unsound-step-00000008").is_dir()
    assert (checkpoints / "latest").read_text() == "step-00000013\n"


def on_a_sick_machine(folder: Path, corpus: Path) -> list[Any]:
    """The error, the steps that were taken and the names of checkpoints, with three checkpoints and with one."""
    checkpoints, found = folder / "run/checkpoints", []
    train_with(settings(folder, corpus, 12, checkpoint=EVERY_4TH))
    longer = settings(folder, corpus, 20, checkpoint=EVERY_4TH)
    for gone in ((), ("step-00000004", "step-00000008")):
        for name in gone:
            shutil.rmtree(checkpoints / name)
        with verifying() as verified:
            error, taken = train_with(longer, lambda loss, _: loss * float("nan"))
        assert verified == [True]
        names = sorted(path.name for path in checkpoints.iterdir())
        found.append((error, [step for step, _ in taken], names, (checkpoints / "latest").read_text()))
    return found


def test_a_machine_on_which_no_loss_is_finite_costs_no_checkpoint(small_corpus, tmp_path):
    """The run goes back once, to see whether the older checkpoint is better. With a single checkpoint it can't."""
    ((three, one),) = on_ranks(1, on_a_sick_machine, tmp_path, small_corpus)
    newest, older = (tmp_path / f"run/checkpoints/step-{step:08d}" for step in (12, 8))
    neither = f"no step from {older} or from {newest} had a finite loss"
    assert three[0] == f"{neither}: the cause isn't a checkpoint, but the machine or a changed setting"
    assert three[1:] == (
        [12, 13, 14, 8, 9, 10],
        ["latest", "step-00000004", older.name, newest.name],
        "step-00000012\n",
    )
    assert one[0] == f"{newest}: no step from it had a finite loss, and there is no older checkpoint"
    assert one[1:] == ([12, 13, 14], ["latest", newest.name], "step-00000012\n")


class Weights(Callback):
    """Keeps the checkpoint that a run takes its weights from."""

    source: Path | None = None

    def before_training(self, trainer: Trainer) -> None:
        self.source = trainer.run.initial_weights


def with_an_older_view(folder: Path, corpus: Path) -> tuple[Any, Path | None]:
    """A run of which no step from its last checkpoint is finite, and a run that starts from its weights. Rank 1 sees
    neither rewinds.json nor the last checkpoint."""
    run = settings(folder / "first", corpus, 8, checkpoint=EVERY_4TH)
    train_with(run)
    first, weights = folder / "first/run", Weights()
    if dist.get_rank() == 0:
        for step in (4, 8):
            add_rewind(first, Rewind(step, step * ROWS, (step + 1) * ROWS, step + 1, 9.0))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(train_state, "rewinds", lambda run: [])
            patch.setattr(prepare, "checkpoint_in", lambda path: path / "checkpoints/step-00000004")
        positions = set()

        def until_rewound(loss: Any, position: int) -> Any:
            positions.add(position)
            return loss * (float("nan") if min(positions) >= 8 * ROWS else 1)

        resumed = train_with(settings(folder / "first", corpus, 12, checkpoint=EVERY_4TH), until_rewound)
        new = settings(folder / "second", corpus, 1, checkpoint={"init_from": str(first)})
        train_with(new, callbacks=[weights])
    return resumed, weights.source


def test_ranks_start_from_the_rows_and_weights_that_rank_0_sees(small_corpus, tmp_path, schedule):
    found = on_ranks(2, with_an_older_view, tmp_path, small_corpus)
    assert [resumed[0] for resumed, _ in found] == [0, 0]
    taken = [(step, schedule[step + 1]) for step in (8, 9, 10, *range(4, 12))]
    assert taken_by_both([resumed for resumed, _ in found]) == taken
    assert [source for _, source in found] == [tmp_path / "first/run/checkpoints/step-00000012"] * 2


def test_a_spike_sends_the_run_back_and_past_the_offending_rows(folder, told, schedule):
    """After the rewind, step 13 takes the rows of step 14, and so on."""
    taken = taken_by_both([of_rank["spiking"] for of_rank in told])
    expected = [(step, schedule[step]) for step in range(13)]
    expected += [(step, schedule[step + 1]) for step in range(12, 16)]
    assert taken == expected
    run = folder / "spiking/run"
    (rewind,) = json.loads((run / "rewinds.json").read_text())
    assert (rewind["step"], rewind["position"], rewind["to"], rewind["spike_step"]) == (12, 192, 208, 13)
    assert checkpoint_index.read(run / "checkpoints/step-00000016").train_state.position == 17 * ROWS


def test_ranks_that_verify_a_checkpoint_to_rewind_to_have_the_time_of_a_start(told):
    """Ranks whose share is small wait for the others, without progress of their own."""
    assert [of_rank["verified"] for of_rank in told] == [[True], [True]]


def test_a_spike_that_sends_the_run_back_is_told_and_logged(folder, told):
    """The alert says when the spike was. The step is logged with its loss, and again once it has other rows."""
    spoilt, taken_again = (
        row
        for row, _ in rows_from(folder / "spiking/run/metrics.jsonl")
        if row.step == 13 and "train/loss" in row.metrics
    )
    assert spoilt.metrics["train/loss"] > taken_again.metrics["train/loss"] + 4
    alert = f"step 13: the loss is {spoilt.metrics['train/loss']:.4f}, a spike"
    assert (folder / "alerts").read_text() == f"spike {alert}\n"


def test_a_run_asked_to_stop_in_a_step_that_sends_it_back_takes_no_other(folder, told, schedule):
    """It has saved nothing of the spike. The next start continues after the offending rows."""
    assert [of_rank["stopping"][0] for of_rank in told] == [75, 75]
    taken = taken_by_both([of_rank["stopping"] for of_rank in told])
    assert taken == [(step, schedule[step]) for step in range(13)]
    assert [of_rank["stopped"][0] for of_rank in told] == [0, 0]
    taken = taken_by_both([of_rank["stopped"] for of_rank in told])
    assert taken == [(step, schedule[step + 1]) for step in range(12, 16)]
    rows = {row.step: row.metrics for row in read_metrics(folder / "stopping/run")}
    assert rows[16]["train/spikes"] == 1


def test_all_callbacks_see_the_step_of_a_spike_and_a_stop_requested_there_follows_the_rewind(folder, told, schedule):
    """The run goes back from step 13 to step 12, takes step 13 with the rows of step 14, saves it and stops. The first
    callback sees step 13 before `Spikes` does."""
    assert [of_rank["requested"][0] for of_rank in told] == [75, 75]
    taken = taken_by_both([of_rank["requested"] for of_rank in told])
    assert taken == [*((step, schedule[step]) for step in range(13)), (12, schedule[13])]
    assert (folder / "requested/run/checkpoints/latest").read_text() == "step-00000013\n"
    sound = [(step, False) for step in range(1, 13)]
    seen = [[*sound, (13, False), (13, False)], [*sound, (13, True), (13, False)]]
    assert [[*of_rank["seen"]] for of_rank in told] == [seen, seen]


def test_a_callback_is_restored_after_it_has_set_itself_up(folder, told):
    """A stop and a resume from step 12: the steps that it has counted are those of the whole run."""
    rows = {row.step: row.metrics for row in read_metrics(folder / "stopping/run")}
    assert [rows[step]["mine/steps"] for step in (12, 13, 16)] == [12, 13, 16]
    (state,) = checkpoint_index.read(folder / "stopping/run/checkpoints/step-00000016").train_state.callbacks.values()
    assert state["calls"] == ["before_training", "after_load", "load_state_dict", "before_steps"]


def test_a_run_that_was_sent_back_and_killed_goes_on_past_the_offending_rows(folder, told, small_corpus, schedule):
    """Its latest checkpoint is still from before the spike."""
    run = folder / "spiking/run"
    before = losses(run.parent / "run.yaml")
    (run / "checkpoints/latest").write_text("step-00000012\n")
    gone_on = on_ranks(2, train_with, settings(folder / "spiking", small_corpus, 16))
    assert [code for code, _ in gone_on] == [0, 0]
    assert taken_by_both(gone_on) == [(step, schedule[step + 1]) for step in range(12, 16)]
    assert losses(run.parent / "run.yaml") == before


def test_a_run_whose_losses_stay_high_is_not_sent_back_for_ever(folder, told):
    taken = taken_by_both([of_rank["hopeless"] for of_rank in told])
    assert [step for step, _ in taken] == [*range(13), 12, 12, 13, 14, 15]
    rows = {row.step: row.metrics for row in read_metrics(folder / "hopeless/run")}
    assert len(json.loads((folder / "hopeless/run/rewinds.json").read_text())) == 2
    assert rows[16]["train/spikes"] == 6  # in steps 13, 13, 13, 14, 15 and 16


def test_growing_and_changed_batches_take_the_rows_in_their_order(folder, told, schedule, small_corpus):
    """2 steps of 8 rows and 1 of 16, a stop, and 3 steps of 24, which would have had 32 rows. The curriculum's first
    objective is still that of the first 5 steps."""
    assert {of_rank["growing"][0] for of_rank in told} == {75}
    assert {of_rank["grown"][0] for of_rank in told} == {0}
    taken = [one for name in ("growing", "grown") for one in taken_by_both([of_rank[name] for of_rank in told])]
    assert [len(rows) for _, rows in taken] == [8, 8, 16, 24, 24, 24]
    row_offsets = scheduled(open_corpus(small_corpus).with_objective(LONG_SPANS))
    own, long_spans = ([row for rows in found for row in rows] for found in (schedule, row_offsets))
    assert [row for _, rows in taken for row in rows] == long_spans[:80] + own[80:104]
    index = checkpoint_index.read(folder / "growing/run/checkpoints/step-00000006")
    assert (index.train_state.position, index.consumed) == (104, [104])
