"""Callbacks do all that happens in training besides its steps; the trainer is what they see.

A run file adds callbacks of one's own, each a class in any package: docs/how-to/write-a-callback.md.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_pipeline.foundation.errors import StoreError
from data_pipeline.loading.batches import Batch, TrainingBatches
from data_pipeline.loading.prefetch import Lookahead, on_device
from data_pipeline.loading.stream import StreamState
from pretrain import models
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.engine_state import restore
from pretrain.checkpoint.save import Saved
from pretrain.checkpoint.tensors import verify_together
from pretrain.run import heartbeat, watchdog
from pretrain.run.train_state import TrainState
from pretrain.trainer import micro_batch
from pretrain.trainer.attention_check import choose_attention
from pretrain.trainer.run_report import RunReport
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.construction import keys_against_adding
from pretrain.zero.engine import Engine, Outcome


class Callback:
    """One concern of training. Each method is called on all ranks, of one callback after the other in the order of
    `loop.build_callbacks`; a callback has those that it needs.

    An error ends the run, on all ranks: an evaluation that may fail is a hook instead (`pretrain.evaluation.hook`).
    """

    def before_training(self, trainer: "Trainer") -> None:
        """Called once, when the model is built and its weights are loaded."""

    def before_steps(self, trainer: "Trainer") -> None:
        """Called when steps begin, and when they begin anew since the run went back to a checkpoint."""

    def requests(self, trainer: "Trainer") -> Mapping[str, bool]:
        """This rank's requests, by name, the same names on all ranks. After the step, `trainer.requested` says what
        any rank has asked for. "stop" saves and stops after this step."""
        return {}

    def before_step(self, trainer: "Trainer") -> None:
        """Called before step `trainer.step`, on `trainer.micro_batches`."""

    def during_step(self, trainer: "Trainer") -> AbstractContextManager[None]:
        """Encloses the step. It must not change it, nor communicate between ranks without need."""
        return contextlib.nullcontext()

    def after_step(self, trainer: "Trainer") -> None:
        """Called after each step, with its `trainer.outcome`."""

    def after_pause(self, trainer: "Trainer") -> None:
        """Called after an evaluation or a save, whose time isn't that of steps."""

    def after_load(self, trainer: "Trainer", checkpoint: Path) -> None:
        """Called when the weights and the optimizer state of a checkpoint are loaded."""

    def after_save(self, trainer: "Trainer", saved: Saved) -> None:
        """Called when a checkpoint is on disk, or couldn't be written."""

    def before_going_back(self, trainer: "Trainer") -> None:
        """Called before the run goes back, or ends because its last steps were wrong: what isn't on disk is dropped."""

    def finish_saving(self, trainer: "Trainer") -> None:
        """Called when what is being written must be on disk before the run continues."""

    def after_training(self, trainer: "Trainer") -> None:
        """Called once, when the run has finished or stops; not after an error."""

    def metrics(self, trainer: "Trainer") -> Mapping[str, float]:
        """The metrics since the last call, by name, for a line of the log. Only rank 0's count."""
        return {}

    def after_log(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        """Called with the metrics of a line of the log, or of an evaluation. On ranks but 0, some are this rank's
        alone."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this callback in a checkpoint, as JSON, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` has returned. Called before the first step; and with {} if there is nothing."""


class Trainer:
    """A run in training: its engine, and where it stands. All ranks create one together.

    - `run`, `config`, `report`: the checked run file, its settings, and the run directory, tracker and console.
    - `engine`: the model under DeepSpeed. `plan`, `layout`: this rank's part of each step, and of those after the
      ramp-up.
    - `outline`: the model on the meta device, with whole shapes.
    - `state`, `before`: the progress after the last step, and before it.
    - `micro_batches`: this rank's of the step, for which it waited `waited` seconds.
    - `outcome`: of the last step. `requested`: what any rank has asked for in it, by name.
    - `stopping`: the run saves and stops after this step.
    - `weights`: a fingerprint of the weights after this step, if it is saved.
    """

    micro_batches: list[Batch]
    outcome: Outcome

    def __init__(self, run: ValidatedRun, report: RunReport, engine: Engine, callbacks: dict[str, Callback]):
        self.run, self.report, self.engine, self.callbacks = run, report, engine, callbacks
        self.config = run.config
        self.outline = models.outline(run.model)
        if run.resume:
            self._load(run.resume)
        elif run.initial_weights:
            verify_together(run.initial_weights, run.model)
            restore(engine, run.initial_weights, weights_only=True)
        for key in keys_against_adding(self.config, run.ranks):
            report.warn(
                f"{key}: DeepSpeed reduces gradients, parameter by parameter; a step is faster without this key"
            )
        self._tell_warnings()
        if problem := choose_attention(run, engine.device):
            report.warn(problem)
        self.plan = micro_batch.choose(run, engine)
        self.layout = self.plan.layout
        self.state = self.before = run.train_state
        self.requested: dict[str, bool] = {}
        self.stopping = self.asked_to_stop = self._went_back = False
        self.waited = 0.0
        self.weights: str | None = None
        self._lookahead: Lookahead[list[Batch]] | None = None
        for name, callback in callbacks.items():
            callback.load_state_dict(self.state.callbacks.get(name, {}))

    @property
    def step(self) -> int:
        """The step that is taken or was just taken, from 1."""
        return self.before.step + 1

    @property
    def last(self) -> bool:
        """True if it is the last one of the run."""
        return self.step == self.config.run.max_steps

    @property
    def logging(self) -> bool:
        """True if the log of metrics has a line of it."""
        return self.step % self.config.tracking.log_every_steps == 0 or self.last or self.stopping

    @property
    def saving(self) -> bool:
        """True if a checkpoint follows it."""
        return self.step % self.config.checkpoint.every_steps == 0 or self.last or self.stopping

    @property
    def store_error(self) -> StoreError | None:
        """Why the store of a remote corpus gives this rank no more rows; None while it does."""
        return self._lookahead.lost if self._lookahead else None

    def stop(self) -> None:
        """Asks for a stop after the next step, which is saved. One rank may ask alone."""
        self.asked_to_stop = True

    def steps(self) -> Iterator[list[Batch]]:
        """The micro-batches of each step, from `state` on, until the run ends or stops."""
        self._went_back = True
        while self._went_back:
            self._went_back = False
            yield from self._steps_from(self.state)

    def _steps_from(self, start: TrainState) -> Iterator[list[Batch]]:
        config, stream = self.config, self.run.stream_from(start)
        few, state = self.engine.in_few_shapes, StreamState.at(stream, start.position, start.skipped)
        self._batches = TrainingBatches(stream, self.layout, state, self.run.lengths if few else None)
        accumulations = map(self.plan.accumulation, range(start.step, config.run.max_steps))
        pin = self.engine.device.type == "cuda"
        loaded = self._batches.loader(accumulations, config.data.workers, config.data.prefetch, pin)
        self._lookahead = Lookahead(loaded) if any(corpus.remote for corpus in self.run.training) else None
        for callback in self.callbacks.values():
            callback.before_steps(self)
        watchdog.starting()  # because the loader's processes start now
        heartbeat.mark(start.step)
        batches = on_device(self._lookahead or loaded, self.engine.device, few)
        for waited, micro_batches in _timed(self.engine.times.loading(batches)):
            self.before, self.waited, self.micro_batches = self.state, waited, micro_batches
            yield micro_batches
            if self.stopping or self._went_back:
                return

    def take_step(self, micro_batches: list[Batch]) -> None:
        """Trains on the micro-batches, within `during_step` of all callbacks, and notes the new state."""
        asked: dict[str, bool] = {}
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks.values():
                for name, mine in callback.requests(self).items():
                    asked[name] = asked.get(name, False) or mine
                callback.before_step(self)
                stack.enter_context(callback.during_step(self))
            stack.enter_context(self.engine.times.step())
            before = self.before
            outcome = self.outcome = self.engine.step(before.step, before.position, micro_batches, asked)
        watchdog.step_done()
        self._tell_warnings()
        self.requested = outcome.requests
        self.stopping = self.requested.get("stop", False)
        self.state = TrainState(
            self.step,
            before.position + self.layout.rows(len(micro_batches)),
            self._batches.skipped,
            before.health.after(outcome.loss, outcome.applied, self.config.faults.spikes),
            {} if self.logging else dict(self.engine.unlogged),
        )

    def after_step(self) -> None:
        """Calls the callbacks after a step; none any more once one has gone back to a checkpoint."""
        for callback in self.callbacks.values():
            callback.after_step(self)
            if self._went_back:
                return

    def state_to_save(self) -> TrainState:
        """The state, with that of the callbacks."""
        states = {name: state for name, callback in self.callbacks.items() if (state := callback.state_dict())}
        return replace(self.state, callbacks=states)

    def _tell_warnings(self) -> None:
        while self.engine.warnings:
            self.report.warn(self.engine.warnings.pop(0))

    def paused(self) -> None:
        """Tells the callbacks that an evaluation or a save has just taken time."""
        for callback in self.callbacks.values():
            callback.after_pause(self)

    def finish_saving(self) -> None:
        """Has the callbacks wait for what is being written."""
        for callback in self.callbacks.values():
            callback.finish_saving(self)

    def drop_unsaved(self) -> None:
        """Tells the callbacks to drop what isn't on disk: the last steps were wrong."""
        for callback in self.callbacks.values():
            callback.before_going_back(self)

    def go_back(self, checkpoint: Path, state: TrainState) -> None:
        """Loads a checkpoint and resumes from it as `state` says."""
        watchdog.starting()
        self._load(checkpoint)
        for name, callback in self.callbacks.items():
            callback.load_state_dict(state.callbacks.get(name, {}))
        self.state, self._went_back = state, True

    def _load(self, checkpoint: Path) -> None:
        restore(self.engine, checkpoint)
        self.engine.unlogged = checkpoint_index.read(checkpoint).unlogged
        for callback in self.callbacks.values():
            callback.after_load(self, checkpoint)


def _timed(steps: Iterable[list[Batch]]) -> Iterator[tuple[float, list[Batch]]]:
    """Yields each item with the seconds spent waiting for it."""
    started = time.perf_counter()
    for item in steps:
        yield time.perf_counter() - started, item
        started = time.perf_counter()
