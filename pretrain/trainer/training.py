"""The steps of a run, with their evaluations, checkpoints and faults. Imports DeepSpeed."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.formatting import human_size
from data_pipeline.loading.batches import Batch, TrainingBatches
from data_pipeline.loading.device import on_device
from data_pipeline.loading.lookahead import Lookahead
from data_pipeline.loading.stream import StreamState
from pretrain import models
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.choose import newest_verified
from pretrain.checkpoint.directory import all_steps, set_aside, set_aside_after, set_latest
from pretrain.checkpoint.memory import MemoryCheckpoints, memory_bytes
from pretrain.checkpoint.restore import restore
from pretrain.checkpoint.save import Saved, Saver
from pretrain.checkpoint.tensors import load_weights
from pretrain.evaluation import record
from pretrain.evaluation.hook import HeldOut
from pretrain.evaluation.hook_runner import HookRunner
from pretrain.faults.fingerprints import Fingerprints
from pretrain.faults.replay import Finding, Replay, interval
from pretrain.faults.restarts import earlier_seconds
from pretrain.faults.stragglers import Stragglers
from pretrain.run import heartbeat, node_memory, outcome, status, stop_signals, watchdog
from pretrain.run.cpu_speed import seconds_left
from pretrain.run.health import Health
from pretrain.run.train_state import Rewind, TrainState, add_rewind, rewinds
from pretrain.trainer import micro_batch, wrappers
from pretrain.trainer.run_report import RunReport
from pretrain.trainer.throughput import ThroughputMeter, peak_flops, peak_of_products
from pretrain.trainer.trial_passes import compile_kernels
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.construction import construct
from pretrain.zero.deepspeed_private import gathered
from pretrain.zero.engine import Engine
from pretrain.zero.memory import peak_memory
from pretrain.zero.ranks import communication_device, first_value, least, on_rank_0

_TRIED = 3  # steps after a resume; if none of them is finite, the checkpoint isn't sound
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
        hours = config.run.max_hours
        self.deadline = time.monotonic() + hours * 3600 - earlier_seconds() if hours else float("inf")
        model, outline = construct(config, run.model, drawn=run.resume is None), models.outline(run.model)
        if run.initial_weights and not run.resume:
            load_weights(model, run.initial_weights, gathered)
        wrappers.wrap(model, config, communication_device())
        self.engine = Engine(model, config)
        self.fingerprints = Fingerprints(self.engine)
        if run.resume:
            self._load(run.resume)
        compile_kernels(run, self.engine)
        auto = config.batch.micro_batch_size == "auto"
        rows = micro_batch.choose(run, self.engine) if auto else config.batch.micro_batch(run.ranks)
        self.layout = run.layout(rows)
        products = peak_of_products(config, self.engine.device, outline, run.lengths, rows)
        peak = peak_flops(config, self.engine.device) * run.ranks
        self.meter = ThroughputMeter(outline, peak, products and products * run.ranks)
        report.announce(outline.num_parameters(), self.layout)
        if self.engine.device.type == "cpu":
            report.forecast_on_cpu(seconds_left(config, run.model, run.lengths, run.train_state.step, peak))
        self.saver = Saver(self.engine, run.origin)
        self.memory = self._memory_checkpoints()
        data, tokenizer = config.data, run.training[0].tokenizer
        held_out = HeldOut(run.validation, tokenizer, data.on_damage == "skip", self.layout)
        self.hooks = HookRunner(config.evaluation, held_out, record.directory(run.directory))
        self.state = run.train_state
        self.untried = run.resume  # the checkpoint that was resumed from, until a step from it was applied
        tables, factor = record.directory(run.directory), config.faults.straggler_factor
        every = interval(
            config.faults.replay_every_steps, self.layout.accumulation, run.ranks, config.checkpoint.every_steps
        )
        repeats = self.engine.device.type == "cpu" or config.compute.deterministic
        self.replay = Replay(self.engine, every, report.machines, repeats)
        self.stragglers = Stragglers(factor, report.machines, tables, config.data.remote, report.connects_to_mlflow)

    def run(self) -> int:
        """Returns the exit code: 0 if the run has finished, 75 if it stopped on request."""
        while (end := self._train()) is End.REWOUND:
            pass
        self._saved(self.saver.wait(), last=True)
        if self.memory:
            self.memory.close()
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
        ahead = Lookahead(loaded) if any(corpus.remote for corpus in self.validated.training) else None
        step_began = time.monotonic()
        self.meter.restart()
        self.stragglers.restart()
        self.replay.restart(start.step)
        watchdog.starting()  # because the loader's processes start now
        heartbeat.mark(start.step)
        for waited, micro_batches in _timed(self.engine.times.loading(on_device(ahead or loaded, self.engine.device))):
            before, step = self.state, self.state.step + 1
            store_error = ahead.lost if ahead else None
            held_back = self.memory is None or not self.memory.due(step)
            requests = (self._stop_requested(step), self.saver.failed, store_error is not None, held_back)
            last = step == config.run.max_steps
            replaying = self.replay.during(before.step, before.position, micro_batches)
            with replaying, self.hooks.during(self.engine, step, last), self.engine.times.step():
                outcome = self.engine.step(before.step, before.position, micro_batches, requests)
            watchdog.step_done()
            if self.replay.found:
                self._computed_wrong(step, self.replay.found)
            stopping, save_failed, store_lost, held_back = outcome.requests
            stopping |= store_lost
            health = before.health.after(outcome.loss, outcome.applied, config.faults.spikes)
            position = before.position + layout.rows(len(micro_batches))
            logging = step % config.tracking.log_every_steps == 0 or last or stopping
            unlogged = {} if logging else self.engine.unlogged
            self.state = TrainState(step, position, batches.skipped, health, unlogged)
            self._saved(self.saver.wait() if save_failed else self.saver.done())
            if outcome.applied:
                self.untried = None
                self.saver.prove()
                if self.memory and not held_back and not last:  # the last must be on disk
                    self.memory.take(self.state)
                    if self.memory.problem:
                        self.report.warn(self.memory.problem)
            elif self._skipped():
                return End.REWOUND
            if health.spikes > before.health.spikes and self._spiked(before.health, outcome.loss):
                return End.REWOUND
            if step == start.step + _TYPICAL_STEP:
                self.report.forecast(step, time.monotonic() - step_began)
            step_began = time.monotonic()
            self.meter.step(waited, micro_batches)
            for findings in self.stragglers.step(step, self.engine.times):
                self.report.record_findings(step, findings)
            if logging:
                self._log()
            if self.memory:
                self.memory.logged()
            for findings in self.hooks.after(self.engine, step, last):
                self.report.record_findings(step, findings)
                self.meter.restart()
            if step % config.checkpoint.every_steps == 0 or last or stopping:
                with watchdog.slow_phase():
                    self._compare_weights()
                    self._saved(self.saver.start(self.state, self.fingerprints.of_masters()))
                    if last or stopping:
                        self._prove_last(micro_batches[0])
                self.meter.restart()
            if stopping and not last:
                if store_lost:
                    self.report.warn(f"{first_value(store_error)}; stopping after step {step}, which is saved")
                return End.STOPPED
        return End.FINISHED

    def _memory_checkpoints(self) -> MemoryCheckpoints | None:
        """Those of this run; None without a supervisor, which would go on from them."""
        every, node = self.config.checkpoint.memory_every_steps, node_memory.given()
        if every is None or node is None:
            return None
        node.mkdir(mode=0o700, parents=True, exist_ok=True)
        needed = memory_bytes(self.engine) * int(os.environ["LOCAL_SIZE"])
        if least(node_memory.free_bytes(node) - needed, self.engine.device) < 0:
            self.report.warn(
                f"{node}: too small for checkpoints in memory, which need {human_size(needed)} of each node"
            )
            return None
        return MemoryCheckpoints(self.engine, self.validated.origin, node, every)

    def _log(self) -> None:
        state = self.state
        counts = {
            "train/skipped_steps": state.health.skipped,
            "train/spikes": state.health.spikes,
            "train/rows": state.position,
            "train/tokens": self.validated.tokens(state.position),
            "train/peak_memory_gigabytes": peak_memory(self.engine.device) / 1e9,
            **self.stragglers.metrics,
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

    def _skipped(self) -> bool:
        """Reports a skipped step; returns whether the run went back to an older checkpoint.

        Raises FailedError after too many in a row. The state before them isn't saved: no finite loss came from it.
        """
        health, most = self.state.health, self.config.faults.max_skipped_steps
        message = f"step {self.state.step}: the loss or its gradient isn't finite"
        self.report.warn(f"{message}; step skipped ({health.in_a_row} in a row, {health.skipped} in total)")
        if self.untried and self.state.step - checkpoint_index.read(self.untried).step >= min(_TRIED, most):
            self._further_back(self.untried)
            return True
        if health.in_a_row < most:
            return False
        self._saved(self.saver.wait())
        raise FailedError(f"{message}, for {most} steps in a row (faults.max_skipped_steps)")

    def _prove_last(self, batch: Batch) -> None:
        """Computes a loss from the state that was saved last, since no step follows. Raises FailedError at the end."""
        if self.engine.has_finite_loss(batch):
            self.saver.prove()
        elif self.state.step == self.config.run.max_steps:
            raise FailedError(f"step {self.state.step}: the loss after the last step isn't finite")

    def _further_back(self, unsound: Path) -> None:
        """Goes back to the checkpoint before `unsound`, from which no step was finite. Raises FailedError without one.

        It is set aside, or removed if it was in memory.
        """
        run = self.validated
        self._saved(self.saver.wait())
        if self.memory:
            self.memory.forget()
        aside = on_rank_0(lambda: _out_of_the_way(run.directory, unsound))
        checkpoint = newest_verified(run.directory, run.rank, run.ranks, self.engine.device)
        found = f"{unsound}: no step from it had a finite loss; it is {f'now {aside}' if aside else 'removed'}"
        if checkpoint is None:
            raise FailedError(f"{found}, and there is no older checkpoint")
        self._restore(checkpoint)
        self.state = replace(run.state_of(checkpoint), skipped=self.state.skipped)
        self.untried = checkpoint
        self.report.warn(f"{found}; going back to step {self.state.step}")

    def _compare_weights(self) -> None:
        """Raises FailedError if a rank computes with weights that aren't the optimizer's: steps since then are wrong.

        The next attempt goes on from the last checkpoint on disk, before which they were right.
        """
        if difference := self.fingerprints.difference():
            if difference.rank is not None:
                outcome.faulty(difference.rank, self.validated.rank)
            if self.memory:
                self.memory.forget()
            raise FailedError(f"step {self.state.step}: {difference.what}; its memory or its processor may be faulty")

    def _computed_wrong(self, step: int, finding: Finding) -> None:
        """Raises FailedError, since gradients are wrong: those of `step`, and maybe all since the last clean replay.

        The next attempt goes on from the newest checkpoint on disk that isn't later than that replay. Later ones are
        set aside. With replays at each save there are none. The oldest stays in any case: the run would begin anew.
        Checkpoints in memory are dropped, since they are of the last steps.
        """
        if finding.rank is not None:
            outcome.faulty(finding.rank, self.validated.rank)
        self._saved(self.saver.wait())
        if self.memory:
            self.memory.forget()
        clean, run = self.replay.clean, self.validated.directory
        aside = on_rank_0(lambda: set_aside_after(run, clean))
        renamed = f"; {', '.join(path.name for path in aside)}: set aside" if aside else ""
        raise FailedError(f"step {step}: {finding.what}; nothing was wrong at step {clean}{renamed}")

    def _load(self, checkpoint: Path) -> None:
        """Loads a checkpoint. Raises FailedError if the weights then aren't those that were used before it."""
        restore(self.engine, checkpoint)
        index = checkpoint_index.read(checkpoint)
        self.engine.unlogged = index.unlogged
        if index.weights is not None and self.fingerprints.of_masters() != index.weights:
            raise FailedError(f"{checkpoint}: its weights aren't those that the run had when it saved them")

    def _restore(self, checkpoint: Path) -> None:
        watchdog.starting()
        self._load(checkpoint)
        if self.memory:
            self.memory.forget()

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
        then, now = checkpoint_index.read(checkpoint).train_state, self.state
        self._restore(checkpoint)
        if run.rank == 0:
            add_rewind(run.directory, Rewind(then.step, then.position, now.position, now.step, loss))
        # training goes on with the rows after the spike
        self.state = replace(then, position=now.position, skipped=now.skipped)
        rows = now.position - then.position
        self.report.warn(f"rewound to step {then.step}; skipping {rows} rows, up to row {now.position}")
        return True


def _out_of_the_way(run: Path, unsound: Path) -> Path | None:
    """Sees to it that nothing resumes from `unsound`; returns its new path, None if it was in memory."""
    if unsound.parent.parent != run:
        shutil.rmtree(unsound, ignore_errors=True)
        return None
    aside, older = set_aside(unsound), all_steps(run)
    step = max((one for one in older if one < checkpoint_index.read(aside).step), default=None)
    if step is not None:
        set_latest(run, step)
    return aside


def _timed(steps: Iterable[list[Batch]]) -> Iterator[tuple[float, list[Batch]]]:
    """Yields each item with the seconds spent waiting for it."""
    started = time.perf_counter()
    for item in steps:
        yield time.perf_counter() - started, item
        started = time.perf_counter()
