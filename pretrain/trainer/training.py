"""The steps of a run, with their evaluations, checkpoints and faults. Imports DeepSpeed."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import Enum
from functools import partial

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.errors import FailedError
from data_pipeline.loading.batches import Batch, TrainingBatches
from data_pipeline.loading.device import on_device
from data_pipeline.loading.lookahead import Lookahead
from data_pipeline.loading.stream import StreamState
from data_pipeline.loading.texts import with_texts
from pretrain import models
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.choose import newest_verified
from pretrain.checkpoint.directory import checkpoint_directory
from pretrain.checkpoint.restore import restore
from pretrain.checkpoint.save import Saved, Saver
from pretrain.checkpoint.tensors import load_weights
from pretrain.evaluation import record
from pretrain.evaluation.hook import HeldOut
from pretrain.evaluation.hook_runner import HookRunner
from pretrain.run import status, stop_signals, watchdog
from pretrain.run.health import Health
from pretrain.run.train_state import Rewind, TrainState, add_rewind, rewinds
from pretrain.trainer import micro_batch
from pretrain.trainer.run_report import RunReport
from pretrain.trainer.teacher import Teacher, forward_flops
from pretrain.trainer.throughput import ThroughputMeter, peak_flops, peak_of_products
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.construction import construct
from pretrain.zero.deepspeed_private import gathered
from pretrain.zero.engine import Engine
from pretrain.zero.memory import peak_memory
from pretrain.zero.ranks import communication_device, first_value, on_rank_0

_TYPICAL_STEP = 3  # after a start, the first that takes as long as later ones


class End(Enum):
    """Why the loop over steps ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    REWOUND = "rewound"


class Training:
    """Trains from the current state to the end of the run or to a request to stop, on all ranks in step."""

    def __init__(self, run: ValidatedRun, report: RunReport, stop_at_step: int | None):
        config = self.config = run.config
        self.validated, self.report, self.stop_at_step = run, report, stop_at_step
        hours, distillation = config.run.max_hours, config.distillation
        self.deadline = time.monotonic() + hours * 3600 if hours else float("inf")
        model, outline = construct(config, run.model), models.outline(run.model)
        if run.initial_weights and not run.resume:
            load_weights(model, run.initial_weights, gathered)
        self.teacher = Teacher.load(distillation, config.precision, communication_device()) if distillation else None
        self.engine = Engine(model, config, self.teacher)
        if run.resume:
            restore(self.engine, run.resume)
        auto = config.batch.micro_batch_size == "auto"
        rows = micro_batch.choose(run, self.engine) if auto else config.batch.micro_batch(run.ranks)
        self.layout = run.layout(rows)
        products = peak_of_products(config, self.engine.device, outline, run.lengths, rows)
        self.meter = ThroughputMeter(
            outline,
            peak_flops(config, self.engine.device) * run.ranks,
            products and products * run.ranks,
            partial(forward_flops, self.teacher.model) if self.teacher else None,
        )
        report.announce(outline.num_parameters(), self.layout)
        self.saver = Saver(self.engine, run.origin)
        data, tokenizer = config.data, run.training[0].tokenizer
        held_out = HeldOut(run.validation, tokenizer, data.on_damage == "skip", self.layout)
        self.hooks = HookRunner(config.evaluation, held_out, record.directory(run.directory))
        self.state = self.last_applied = run.train_state  # last_applied: after the last step that wasn't skipped

    def run(self) -> int:
        """Returns the exit code: 0 if the run has finished, 75 if it stopped on request."""
        while (end := self._train()) is End.REWOUND:
            pass
        self._saved(self.saver.wait(), last=True)
        watchdog.alive()
        self.engine.close()
        self.report.finish(self.state.step, end is End.FINISHED)
        return 0 if end is End.FINISHED else STOPPED

    def _train(self) -> End:
        """Takes steps until the run finishes, stops or rewinds."""
        config, layout, start = self.config, self.layout, self.state
        batches = TrainingBatches(
            self.validated.stream, layout, StreamState.at(self.validated.stream, start.position, start.skipped)
        )
        accumulations = [config.batch.rows(step) // layout.rows(1) for step in range(start.step, config.run.max_steps)]
        pin = self.engine.device.type == "cuda"
        loaded = batches.loader(accumulations, config.data.workers, config.data.prefetch, pin)
        if self.teacher:
            loaded = ([with_texts(batch) for batch in step] for step in loaded)
        ahead = Lookahead(loaded) if any(corpus.remote for corpus in self.validated.training) else None
        step_began = time.monotonic()
        self.meter.restart()
        watchdog.starting()  # because the loader's processes start now
        for waited, micro_batches in _timed(on_device(ahead or loaded, self.engine.device)):
            before, step = self.state, self.state.step + 1
            store_error = ahead.lost if ahead else None
            requests = (self._stop_requested(step), self.saver.failed, store_error is not None)
            last = step == config.run.max_steps
            with self.hooks.during(self.engine, step, last):
                outcome = self.engine.step(before.step, before.position, micro_batches, requests)
            watchdog.step_done()
            stopping, save_failed, store_lost = outcome.requests
            stopping |= store_lost
            health = before.health.after(outcome.loss, outcome.applied, config.faults.spikes)
            position = before.position + layout.rows(len(micro_batches))
            self.state = TrainState(step, position, batches.skipped, health)
            self._saved(self.saver.wait() if save_failed else self.saver.done())
            if outcome.applied:
                self.last_applied = self.state
            else:
                self._skipped()
            if health.spikes > before.health.spikes and self._spiked(before.health, outcome.loss):
                return End.REWOUND
            if step == start.step + _TYPICAL_STEP:
                self.report.forecast(step, time.monotonic() - step_began)
            step_began = time.monotonic()
            self.meter.step(waited, micro_batches)
            if step % config.tracking.log_every_steps == 0 or last or stopping:
                self._log()
            for findings in self.hooks.after(self.engine, step, last):
                self.report.record_findings(step, findings)
                self.meter.restart()
            if step % config.checkpoint.every_steps == 0 or last or stopping:
                with watchdog.slow_phase():
                    self._saved(self.saver.start(self.state))
                self.meter.restart()
            if stopping and not last:
                if store_lost:
                    self.report.warn(f"{first_value(store_error)}; stopping after step {step}, which is saved")
                return End.STOPPED
        return End.FINISHED

    def _log(self) -> None:
        state = self.state
        counts = {
            "train/skipped_steps": state.health.skipped,
            "train/spikes": state.health.spikes,
            "train/rows": state.position,
            "train/tokens": self.validated.tokens(state.position),
            "train/peak_memory_gigabytes": peak_memory(self.engine.device) / 1e9,
        }
        self.report.log(state.step, {**self.engine.take_metrics(), **self.meter.take(), **counts})

    def _stop_requested(self, step: int) -> bool:
        by_file = self.validated.rank == 0 and status.stop_requested(self.validated.directory)
        return stop_signals.received() or by_file or step == self.stop_at_step or time.monotonic() > self.deadline

    def _saved(self, saved: Saved | None, last: bool = False) -> None:
        """Reports a save that has ended. Raises FailedError if it failed and that ends the run."""
        if saved is None:
            return
        if saved.error is None:
            self.report.saved(saved)
        elif last or self.config.checkpoint.on_failure == "stop":
            raise FailedError(saved.error)
        else:
            self.report.warn(f"{saved.error}; training goes on (checkpoint.on_failure)")

    def _skipped(self) -> None:
        """Reports a skipped step. After too many in a row, saves the state before them and raises FailedError."""
        health, most = self.state.health, self.config.faults.max_skipped_steps
        message = f"step {self.state.step}: the loss or its gradient isn't finite"
        self.report.warn(f"{message}; step skipped ({health.in_a_row} in a row, {health.skipped} in total)")
        if health.in_a_row < most:
            return
        self._saved(self.saver.wait())
        good, saved = self.last_applied, ""
        if good.step:
            self.saver.start(good)
            self._saved(self.saver.wait(), last=True)
            directory = checkpoint_directory(self.validated.directory, good.step)
            saved = f"; the state after step {good.step}, the last good one, is saved in {directory}"
        raise FailedError(f"{message}, for {most} steps in a row (faults.max_skipped_steps){saved}")

    def _spiked(self, before: Health, loss: float) -> bool:
        """Reports a spike; returns whether the run went back to a checkpoint before it."""
        spikes, run = self.config.faults.spikes, self.validated
        assert spikes is not None
        mean = sum(before.recent) / len(before.recent)
        self.report.warn(f"step {self.state.step}: loss {loss:.4f} is a spike; the average before was {mean:.4f}")
        if spikes.action == "warn":
            return False
        self._saved(self.saver.wait())
        checkpoint = newest_verified(run.directory, run.rank, run.ranks, self.engine.device)
        if checkpoint is None:
            self.report.warn("not rewound: there is no checkpoint yet")
            return False
        if len(on_rank_0(lambda: rewinds(run.directory))) >= spikes.max_rewinds:
            self.report.warn(f"not rewound: {spikes.max_rewinds} rewinds are the limit (faults.spikes.max_rewinds)")
            return False
        watchdog.starting()
        then, now = checkpoint_index.read(checkpoint).train_state, self.state
        restore(self.engine, checkpoint)
        self.engine.take_metrics()  # discards those of the steps that are undone
        if run.rank == 0:
            add_rewind(run.directory, Rewind(then.step, then.position, now.position, now.step, loss))
        # training goes on with the rows after the spike
        self.state = self.last_applied = replace(then, position=now.position, skipped=now.skipped)
        rows = now.position - then.position
        self.report.warn(f"rewound to step {then.step}; skipping {rows} rows, up to row {now.position}")
        return True


def _timed(steps: Iterable[list[Batch]]) -> Iterator[tuple[float, list[Batch]]]:
    """Yields each item with the seconds spent waiting for it."""
    started = time.perf_counter()
    for item in steps:
        yield time.perf_counter() - started, item
        started = time.perf_counter()
