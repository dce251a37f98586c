"""The training loop.

`Trainer.fit` reads from top to bottom: load the weights, choose the attention backend and the micro-batch size, then
take step after step. Callbacks (`pretrain.training.callbacks`) do everything besides steps.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from data_pipeline.base.errors import StoreError, one_line
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import Batch, TrainingBatches
from data_pipeline.loading.prefetch import Lookahead, on_device
from data_pipeline.loading.stream import StreamState
from pretrain import models
from pretrain.config.batch import BatchPlan
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.engine_state import restore
from pretrain.engine.checkpoint.tensors import verify_together
from pretrain.engine.engine import Engine
from pretrain.models.model import Model
from pretrain.run import heartbeat, watchdog
from pretrain.run.train_state import TrainState
from pretrain.training import micro_batch
from pretrain.training.attention_check import choose_attention
from pretrain.training.callback import Callback, Metrics, StepResult
from pretrain.training.prepare import PreparedRun
from pretrain.training.run_report import RunReport


class Trainer:
    """The training of a run. Each rank has one trainer, and all ranks call its methods together.

    Callbacks read its attributes.
    """

    run: PreparedRun  # the checked run file, with everything that the file names
    report: RunReport  # run directory, tracker and console
    engine: Engine  # the model under DeepSpeed
    metrics: Metrics  # of the next log line; callbacks add to it with `metrics.record`
    plan: BatchPlan  # how this rank divides its rows of each step
    layout: BatchLayout  # the same, for the steps after the ramp-up of the batch size

    state: TrainState  # the progress after the last step
    step: int  # the number of the step that is being taken or was taken last, from 1
    rewinding: tuple[Path, TrainState] | None  # where the run goes back to after the last step, which must not be saved

    def __init__(self, run: PreparedRun, report: RunReport, engine: Engine, callbacks: dict[str, Callback]):
        self.run = run
        self.config = run.config
        self.report = report
        self.engine = engine
        self.metrics = Metrics()
        self.callbacks = callbacks
        self.state = run.train_state
        self.step = run.train_state.step
        self._stop_requested = False
        self._compiled = False
        self.rewinding = None
        self._lookahead: Lookahead[list[Batch]] | None = None

    def fit(self) -> int:
        """Trains from `state` until the run has finished or stops on request; returns the step that it has reached."""
        with self._closing_callbacks() as set_up:
            self._load_weights()
            if problem := choose_attention(self.run, self.engine.device):
                self.report.warn(problem)
            self.plan = micro_batch.choose(self.run, self.engine)
            self.layout = self.plan.layout
            for name, callback in self.callbacks.items():
                callback.before_training(self)
                set_up.append(name)
            self._restore_callbacks(self.run.resume)
            while not self._train_until_rewind():
                pass
            for callback in self.callbacks.values():
                callback.after_training(self)
            watchdog.alive()
            self.engine.close()
        return self.state.step

    @contextlib.contextmanager
    def _closing_callbacks(self) -> Iterator[list[str]]:
        """Yields a list for the names of callbacks that are set up, and closes these callbacks in any case."""
        set_up: list[str] = []
        try:
            yield set_up
        except BaseException as error:
            heartbeat.tell_failed(self.run.world.rank, error)  # now: a callback may take its time to close
            raise
        finally:
            with watchdog.slow_phase():
                for name in set_up:
                    try:
                        self.callbacks[name].close(self)
                    except Exception as error:  # the run has ended as it has ended
                        print(f"warning: {name} can't be closed: {one_line(error)}", file=sys.stderr, flush=True)

    def _train_until_rewind(self) -> bool:
        """Trains from `state`. Returns True when the run ends, and False when it has been rewound to a checkpoint."""
        steps = self._batches()
        began = time.perf_counter()
        for micro_batches in steps:
            waited = time.perf_counter() - began
            if not self._compiled:
                self.engine.compile(micro_batches[0], self.run.world)
                self._compiled = True
            stopping = self._train_step(micro_batches, waited)
            if self.rewinding:
                checkpoint, self.state = self.rewinding
                if not stopping:
                    self._go_back(checkpoint)
                return stopping
            if stopping:
                break
            began = time.perf_counter()
        return True

    def _train_step(self, micro_batches: list[Batch], waited: float) -> bool:
        """Takes one step, which all callbacks then see. Returns True if the run stops after this step."""
        result = self._taken(micro_batches, waited)
        for callback in self.callbacks.values():
            callback.after_step(self, result)
        return result.stopping  # not the result, whose micro-batches would take memory in the next step

    def _taken(self, micro_batches: list[Batch], waited: float) -> StepResult:
        """Takes one step, within `during_step` of all callbacks, and moves `state` on."""
        before, self.step = self.state, self.state.step + 1
        health, stages = before.health, self.config.data.curriculum
        if any(before.step == stage.until_step for stage in stages):
            health = health.in_new_stage()
        votes = {"stop": self._stop_requested}
        for callback in self.callbacks.values():
            for name, vote in callback.votes(self).items():
                votes[name] = votes.get(name, False) or vote
        for callback in self.callbacks.values():
            callback.before_step(self, micro_batches)
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks.values():
                stack.enter_context(callback.during_step(self, micro_batches))
            row_offsets = self.layout.row_offsets(before.position, len(micro_batches))
            outcome = self.engine.step(before.step, row_offsets, micro_batches, votes, self._before_update)
        watchdog.step_done()
        if outcome.applied:
            self.metrics.add_losses(outcome.losses)
        self.state = TrainState(
            step=self.step,
            position=before.position + self.layout.rows(len(micro_batches)),
            skipped=self._training_batches.skipped,
            health=health.after(outcome.loss, outcome.applied, self.config.faults.spikes),
        )
        return StepResult(
            step=self.step,
            loss=outcome.loss,
            applied=outcome.applied,
            losses=outcome.losses,
            votes=outcome.votes,
            micro_batches=micro_batches,
            waited=waited,
            before=before,
            last=self.step == self.config.run.max_steps,
            stopping=outcome.votes["stop"],
        )

    def _before_update(self) -> None:
        for callback in self.callbacks.values():
            callback.before_update(self)

    def _batches(self) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step after `state`, on the device."""
        config, start = self.config, self.state
        stream = self.run.stream_from(start)
        in_few_shapes = self.engine.in_few_shapes
        rows = StreamState.at(stream, start.position, start.skipped)
        self._training_batches = TrainingBatches(stream, self.layout, rows, self.run.lengths if in_few_shapes else None)
        accumulations = self.plan.accumulations(start.step, config.run.max_steps)
        pin = self.engine.device.type == "cuda"
        loaded = self._training_batches.loader(accumulations, config.data.workers, config.data.prefetch_factor, pin)
        self._lookahead = Lookahead(loaded) if any(corpus.remote for corpus in self.run.training) else None
        for callback in self.callbacks.values():
            callback.before_steps(self)
        watchdog.starting()  # the loader's processes start now
        watchdog.mark(start.step)
        return on_device(self._lookahead or loaded, self.engine.device, in_few_shapes)

    @cached_property
    def meta_model(self) -> Model:
        """The model on the meta device, with whole shapes."""
        return models.meta_model(self.run.model)

    def stop(self) -> None:
        """Asks all ranks to save and stop after the next step. One rank may call this alone."""
        self._stop_requested = True

    @property
    def store_error(self) -> StoreError | None:
        """Why the store of a remote corpus has stopped giving rows to this rank; None while the store answers."""
        return self._lookahead.lost if self._lookahead else None

    def state_to_save(self) -> TrainState:
        """`state` with the losses that aren't logged yet, and with the states of the callbacks."""
        states = {name: state for name, callback in self.callbacks.items() if (state := callback.state_dict())}
        return replace(self.state, unlogged=self.metrics.unlogged, callbacks=states)

    def resume_clocks(self) -> None:
        """Call this after an evaluation or a save, so that its time isn't counted as training time."""
        for callback in self.callbacks.values():
            callback.after_pause(self)

    def finish_saving(self) -> None:
        """Has the callbacks wait until the checkpoints that are being written are on disk."""
        for callback in self.callbacks.values():
            callback.finish_saving(self)

    def drop_unsaved(self) -> None:
        """Tells the callbacks to drop what isn't on disk, because the last steps were wrong."""
        for callback in self.callbacks.values():
            callback.before_rewind(self)

    def rewind(self, checkpoint: Path, state: TrainState) -> None:
        """Has the run go back to a checkpoint once all callbacks have seen this step; a callback calls this in
        `after_step`, on all ranks. Training continues with `state`: the checkpoint's, or with later rows.

        A run that also stops after this step loads nothing: the next start resumes from the checkpoint.
        """
        self.rewinding = checkpoint, state

    def _go_back(self, checkpoint: Path) -> None:
        watchdog.starting()
        self._load(checkpoint)
        self._restore_callbacks(checkpoint)
        self.rewinding = None

    def _load_weights(self) -> None:
        """Loads the checkpoint that the run resumes from, or the weights that it starts with."""
        if self.run.resume:
            self._load(self.run.resume)
        elif self.run.initial_weights:
            verify_together(self.run.initial_weights, self.run.model)
            restore(self.engine, self.run.initial_weights, weights_only=True)

    def _load(self, checkpoint: Path) -> None:
        restore(self.engine, checkpoint)
        self.metrics.restore(checkpoint_index.read(checkpoint).train_state)

    def _restore_callbacks(self, checkpoint: Path | None) -> None:
        """Restores the callbacks from `state`, after a `checkpoint` was loaded or, if it is None, before a new run."""
        if checkpoint:
            for callback in self.callbacks.values():
                callback.after_load(self, checkpoint)
        for name, callback in self.callbacks.items():
            callback.load_state_dict(self.state.callbacks.get(name, {}))
