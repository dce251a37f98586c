"""The training loop."""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
from pretrain.checkpoint.directory import directory_of
from pretrain.config import RunConfig
from pretrain.run import arithmetic, lock, slurm, status, stop_signals, watchdog
from pretrain.run.train_state import Rewind, TrainState, add_rewind, rewinds
from pretrain.run.watchdog import watching
from pretrain.trainer.run_report import RunReport
from pretrain.trainer.throughput import ThroughputMeter, peak_flops, peak_of_products
from pretrain.trainer.validate import ValidatedRun, validate
from pretrain.zero.construction import construct
from pretrain.zero.layers import compiles
from pretrain.zero.memory import most_held
from pretrain.zero.ranks import communication_device, first_value, from_rank_0, on_rank_0, process_group

if TYPE_CHECKING:
    from pretrain.checkpoint.save import Saved


_HANG_WHERE_RANKS_COMPILE = 1800.0
_SETTLED = 3  # the first step that takes as long as those after it


def train(config: RunConfig, stop_at_step: int | None = None, fresh: bool = False) -> int:
    """Trains from the latest checkpoint on; returns the exit code: 0 if finished, 75 if stopped after saving.

    It stops on request, or because the store of a remote corpus doesn't answer.

    `fresh` starts a new run and moves an existing one in the run directory aside.
    """
    lock.check(Path(config.run.directory))  # before reading anything there, since another run may be writing it
    faults = config.faults
    hang = faults.hang_seconds
    if hang is None and compiles(config.compute):  # in a collective, ranks wait for one that compiles
        hang = _HANG_WHERE_RANKS_COMPILE
    store_seconds = config.data.cache.wait_seconds if config.data.remote else 0.0
    arithmetic.settle(config.compute)
    if "RANK" not in os.environ:
        os.environ |= slurm.rank_environment(os.environ)
    with (
        watching(int(os.environ.get("RANK", "0")), hang, faults.start_seconds, store_seconds),
        process_group(config.run.cpu_threads, max(hang or 0.0, faults.start_seconds) + store_seconds) as (rank, ranks),
    ):
        return train_on(rank, ranks, config, stop_at_step, fresh)


def train_on(rank: int, ranks: int, config: RunConfig, stop_at_step: int | None = None, fresh: bool = False) -> int:
    """`train` within a process group that exists already."""
    config = from_rank_0(config)  # a network file system may show other hosts an older run file
    run = Path(config.run.directory)
    setup = validate(config, rank, ranks, None if fresh else newest_verified(run, rank, ranks, communication_device()))
    if fresh and (aside := on_rank_0(lambda: status.move_aside(run))) and rank == 0:
        print(f"{run}: moved the existing run to {aside}", flush=True)
    if on_rank_0(lambda: setup.finished):
        if rank == 0:
            print(setup.nothing_left)
        return 0
    with RunReport(setup) as journal:
        if setup.train_state.step >= config.run.max_steps:  # killed after its last checkpoint
            journal.finish(setup.train_state.step, finished=True)
            return 0
        stop_signals.catch()
        code = Training(setup, journal, stop_at_step).run()
        stop_signals.ignore()
        return code


class End(Enum):
    """Why a stretch of steps outcome."""

    FINISHED = "finished"
    STOPPED = "stopped"
    REWOUND = "rewound"


class Training:
    """Trains from the current state to the end of the run or to a request to stop, on all ranks in step."""

    def __init__(self, setup: ValidatedRun, journal: RunReport, stop_at_step: int | None):
        from pretrain.checkpoint.restore import restore  # DeepSpeed chooses its accelerator when it is imported
        from pretrain.checkpoint.save import Saver
        from pretrain.checkpoint.tensors import load_weights
        from pretrain.evaluation import record
        from pretrain.evaluation.hook import HeldOut
        from pretrain.evaluation.hook_runner import HookRunner
        from pretrain.trainer.micro_batch import settled
        from pretrain.trainer.teacher import Teacher, forward_flops
        from pretrain.zero.deepspeed_private import gathered
        from pretrain.zero.engine import Engine

        self.config, self.journal = setup.config, journal
        self.stop_at_step = stop_at_step
        hours = self.config.run.max_hours
        self.deadline = time.monotonic() + hours * 3600 if hours else float("inf")
        model, outline = construct(self.config, setup.model, setup.layout), models.outline(setup.model)
        if setup.initial_weights and not setup.resume:
            load_weights(model, setup.initial_weights, gathered)
        distillation = self.config.distillation
        self.teacher = (
            Teacher.load(distillation, self.config.precision, communication_device()) if distillation else None
        )
        self.engine = Engine(model, self.config, setup.layout, self.teacher)
        if setup.resume:
            restore(self.engine, setup.resume)
        self.setup = setup = settled(setup, self.engine)
        device, ranks = self.engine.device, setup.layout.ranks
        products = peak_of_products(self.config, device, outline, setup.lengths, setup.layout.micro_batch)
        peak = peak_flops(self.config, device) * ranks
        of_teacher = partial(forward_flops, self.teacher.model) if self.teacher else None
        self.meter = ThroughputMeter(outline, peak, products and products * ranks, of_teacher)
        journal.announce(outline.num_parameters(), setup.layout)
        self.saver = Saver(self.engine, setup.origin)
        data, tokenizer = self.config.data, setup.training[0].tokenizer
        held_out = HeldOut(setup.validation, tokenizer, data.objective, data.on_damage == "skip", setup.layout)
        self.hooks = HookRunner(self.config.evaluation, held_out, record.directory(setup.directory))
        self.train_state = self.applied = setup.train_state  # applied: after the last step that was applied

    def run(self) -> int:
        while (end := self._stretch()) is End.REWOUND:
            pass
        self._saved(self.saver.wait(), last=True)
        watchdog.alive()
        self.engine.close()
        self.journal.finish(self.train_state.step, end is End.FINISHED)
        return 0 if end is End.FINISHED else STOPPED

    def _stretch(self) -> End:
        """Trains until the run finishes, stops or rewinds."""
        config, setup, stream = self.config, self.setup, self.setup.stream
        start = self.train_state
        batches = TrainingBatches(stream, setup.layout, StreamState.at(stream, start.position, start.skipped))
        accumulations = [setup.accumulation(step) for step in range(start.step, config.run.max_steps)]
        pin = self.engine.device.type == "cuda"
        loaded = batches.loader(accumulations, config.data.workers, config.data.prefetch, pin)
        if self.teacher:
            loaded = ([with_texts(batch) for batch in step] for step in loaded)
        ahead = Lookahead(loaded) if any(corpus.remote for corpus in setup.training) else None
        last_step = time.monotonic()
        self.meter.restart()
        watchdog.starting()  # because the loader's processes start now
        for waited, step_batches in _timed(on_device(ahead or loaded, self.engine.device)):
            before = self.train_state
            lost = ahead.lost if ahead else None
            requests = (self._stop_wanted(before.step + 1), self.saver.failed, lost is not None)
            last = before.step + 1 == config.run.max_steps
            with self.hooks.during(self.engine, before.step + 1, last):
                outcome = self.engine.step(before.step, before.position, step_batches, requests)
            watchdog.step_done()
            stopping, save_failed, store_lost = outcome.requests
            stopping |= store_lost
            rows = setup.layout.rows(len(step_batches))
            health = before.health.after(outcome.loss, outcome.applied, config.faults.spikes)
            self.train_state = TrainState(before.step + 1, before.position + rows, batches.skipped, health)
            self._saved(self.saver.wait() if save_failed else self.saver.done())
            if outcome.applied:
                self.applied = self.train_state
            else:
                self._skipped()
            if health.spikes > before.health.spikes and self._spiked(before, outcome.loss):
                return End.REWOUND
            step = self.train_state.step
            if step == start.step + _SETTLED:
                self.journal.forecast(step, time.monotonic() - last_step)
            last_step = time.monotonic()
            self.meter.step(waited, step_batches)
            if step % config.tracking.log_every_steps == 0 or last or stopping:
                counts = {
                    "train/skipped_steps": health.skipped,
                    "train/spikes": health.spikes,
                    "train/rows": before.position + rows,
                    "train/tokens": setup.tokens(before.position + rows),
                    "train/peak_memory_gigabytes": most_held(self.engine.device) / 1e9,
                }
                self.journal.log(step, {**self.engine.take_metrics(), **self.meter.take(), **counts})
            for findings in self.hooks.after(self.engine, step, last):
                self.journal.found(step, findings)
                self.meter.restart()
            if step % config.checkpoint.every_steps == 0 or last or stopping:
                with watchdog.apart():
                    self._saved(self.saver.start(self.train_state))
                self.meter.restart()
            if stopping and not last:
                if store_lost:
                    self.journal.warn(f"{first_value(lost)}; stopping after step {step}, which is saved")
                return End.STOPPED
        return End.FINISHED

    def _stop_wanted(self, step: int) -> bool:
        by_file = self.setup.layout.rank == 0 and status.stop_requested(self.setup.directory)
        return stop_signals.received() or by_file or step == self.stop_at_step or time.monotonic() > self.deadline

    def _saved(self, saved: "Saved | None", last: bool = False) -> None:
        """Reports a save that has outcome. Raises FailedError if it failed and that ends the run."""
        if saved is None:
            return
        if saved.error is None:
            self.journal.saved(saved)
        elif last or self.config.checkpoint.on_failure == "stop":
            raise FailedError(saved.error)
        else:
            self.journal.warn(f"{saved.error}; training goes on (checkpoint.on_failure)")

    def _skipped(self) -> None:
        """Reports a skipped step. After too many in a row, saves the state before them and raises FailedError."""
        health, most = self.train_state.health, self.config.faults.max_skipped_steps
        message = f"step {self.train_state.step}: the loss or its gradient isn't finite"
        self.journal.warn(f"{message}; step skipped ({health.in_a_row} in a row, {health.skipped} in total)")
        if health.in_a_row < most:
            return
        self._saved(self.saver.wait())
        run, sound, saved = self.setup.directory, self.applied, ""
        if sound.step:
            kept = directory_of(run, sound.step)
            self.saver.start(sound)
            self._saved(self.saver.wait(), last=True)
            saved = f"; the state after step {sound.step}, the last good one, is saved in {kept}"
        raise FailedError(f"{message}, for {most} steps in a row (faults.max_skipped_steps){saved}")

    def _spiked(self, before: TrainState, loss: float) -> bool:
        """Reports a spike; returns whether the run went back to a checkpoint before it."""
        spikes, run = self.config.faults.spikes, self.setup.directory
        assert spikes is not None
        recent = before.health.recent
        usual = sum(recent) / len(recent)
        self.journal.warn(
            f"step {self.train_state.step}: loss {loss:.4f} is a spike; the average before was {usual:.4f}"
        )
        if spikes.action == "warn":
            return False
        self._saved(self.saver.wait())
        back = newest_verified(run, self.setup.layout.rank, self.setup.layout.ranks, self.engine.device)
        if back is None:
            self.journal.warn("not rewound: there is no checkpoint yet")
        elif len(on_rank_0(lambda: rewinds(run))) >= spikes.max_rewinds:
            self.journal.warn(f"not rewound: {spikes.max_rewinds} rewinds are the limit (faults.spikes.max_rewinds)")
        else:
            self._rewind(back, loss)
            return True
        return False

    def _rewind(self, back: Path, loss: float) -> None:
        """Restores the checkpoint `back`; training then continues with the rows after the spike."""
        from pretrain.checkpoint.restore import restore

        run, spiked = self.setup.directory, self.train_state
        watchdog.starting()
        there = checkpoint_index.read(back).train_state
        restore(self.engine, back)
        self.engine.take_metrics()  # discards those of the steps that are undone
        if self.setup.layout.rank == 0:
            add_rewind(run, Rewind(there.step, there.position, spiked.position, spiked.step, loss))
        self.train_state = self.applied = replace(there, position=spiked.position, skipped=spiked.skipped)
        passed = spiked.position - there.position
        self.journal.warn(f"rewound to step {there.step}; skipping {passed} rows, up to row {spiked.position}")


def _timed(steps: Iterable[list[Batch]]) -> Iterator[tuple[float, list[Batch]]]:
    """Yields each item with the seconds spent waiting for it."""
    started = time.perf_counter()
    for item in steps:
        yield time.perf_counter() - started, item
        started = time.perf_counter()
