"""Handles non-finite losses and loss spikes: counts them, rewinds to a checkpoint, or ends the run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from data_pipeline.base.errors import FailedError
from pretrain.config.run_config import SpikeSection
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.directory import put_back, set_aside, set_latest
from pretrain.engine.checkpoint.tensors import newest_verified
from pretrain.engine.ranks import on_rank_0
from pretrain.run import watchdog
from pretrain.run.train_state import Rewind, TrainState, add_rewind, rewinds
from pretrain.training.callback import Callback, StepResult
from pretrain.training.prepare import state_of
from pretrain.training.trainer import Trainer

_TRIED = 3  # steps after a resume: if the loss of none is finite, the checkpoint is unsound


class SkippedSteps(Callback):
    """`faults.max_skipped_steps`: counts steps with a non-finite gradient, whose update is skipped. Too many in a row
    end the run. If the first steps after a resume are all non-finite, the run rewinds to the checkpoint before. It does
    so once: if the first steps from there are non-finite too, the checkpoints aren't the cause, and the run ends."""

    priority = 50

    def before_training(self, trainer: Trainer) -> None:
        self._untried = trainer.run.resume  # the checkpoint that was resumed from, until a step is applied
        self._since = trainer.state.step  # its step; rank 0 may have renamed the checkpoint when it is needed
        self._newer: tuple[Path, Path] | None = None  # the checkpoint that the run went back from: its name, and now

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        return {"train/skipped_steps": trainer.state.health.skipped}

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.applied:
            self._untried = None
            return
        health, step = trainer.state.health, result.step
        most = trainer.config.faults.max_skipped_steps
        message = f"step {step}: the loss or its gradient isn't finite"
        trainer.report.warn(f"{message}; step skipped ({health.in_a_row} in a row, {health.skipped} in total)")
        if self._untried and step - self._since >= min(_TRIED, most):
            self._further_back(trainer, self._untried)
        elif health.in_a_row >= most:  # this state isn't saved: no finite loss came from it
            trainer.finish_saving()
            raise FailedError(f"{message}, for {most} steps in a row (faults.max_skipped_steps)")

    def _further_back(self, trainer: Trainer, unsound: Path) -> None:
        """Rewinds to the checkpoint before `unsound`, which is set aside so that no run resumes from it. Raises
        FailedError if there is no older checkpoint, or if the run has gone back already: every checkpoint then has its
        name."""
        run = trainer.run.directory
        trainer.drop_unsaved()
        if self._newer:
            newer, aside = self._newer
            on_rank_0(lambda: _undo(run, newer, aside), None)
            neither = f"no step from {unsound} or from {newer} had a finite loss"
            raise FailedError(f"{neither}: the cause isn't a checkpoint, but the machine or a changed setting")
        found = f"{unsound}: no step from it had a finite loss"
        watchdog.starting()  # verifying may take longer than steps
        try:
            checkpoint = newest_verified(run, before=self._since)
        except FailedError as error:
            raise FailedError(f"{found}; {error}") from None
        if checkpoint is None:
            raise FailedError(f"{found}, and there is no older checkpoint")
        # on rank 0, since a network file system may show other hosts an older rewinds.json
        then, now = on_rank_0(lambda: state_of(run, checkpoint), TrainState), trainer.state
        aside = on_rank_0(lambda: _set_aside(run, unsound, then.step), Path)
        trainer.rewind(checkpoint, replace(then, skipped=now.skipped, health=now.health.rewound_to(then.health)))
        self._untried, self._since, self._newer = checkpoint, then.step, (unsound, aside)
        trainer.report.warn(f"{found}; it is now {aside}; rewinding to step {then.step}")


def _set_aside(run: Path, unsound: Path, older: int) -> Path:
    """Sets `unsound` aside and points `latest` to the checkpoint of step `older`; returns the new path of `unsound`."""
    set_latest(run, older)
    return set_aside(unsound)


def _undo(run: Path, newer: Path, aside: Path) -> None:
    """Undoes `_set_aside`."""
    put_back(aside, newer)
    set_latest(run, checkpoint_index.read(newer).step)


class Spikes(Callback):
    """`faults.spikes`: reports loss spikes, each once, however many steps it lasts. With the action `rewind`, restores
    the latest checkpoint and skips the rows up to the spike."""

    priority = 40
    _why_not = ""  # the last spike didn't rewind the run

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        return {"train/spikes": trainer.state.health.spikes}

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        before, settings = result.before.health, trainer.config.faults.spikes
        if trainer.state.health.spikes == before.spikes:
            return
        assert settings is not None  # the callback isn't there otherwise
        if not before.spiking:
            mean, loss = sum(before.recent) / len(before.recent), result.loss
            trainer.report.warn(f"step {result.step}: loss {loss:.4f} is a spike; the average before was {mean:.4f}")
            self._why_not = ""
        if settings.action == "rewind" and not self._why_not and (why_not := self._rewind(trainer, result, settings)):
            trainer.report.warn(f"not rewound: {why_not}")
            self._why_not = why_not

    def _rewind(self, trainer: Trainer, result: StepResult, settings: SpikeSection) -> str:
        """Rewinds the run, or returns why it can't be rewound."""
        run = trainer.run
        trainer.finish_saving()
        watchdog.starting()  # verifying may take longer than steps
        checkpoint = newest_verified(run.directory)
        if checkpoint is None:
            return "there is no checkpoint yet"
        if on_rank_0(lambda: len(rewinds(run.directory)), int) >= settings.max_rewinds:
            return f"{settings.max_rewinds} rewinds are the limit (faults.spikes.max_rewinds)"
        then, now = checkpoint_index.read(checkpoint).train_state, trainer.state
        health = now.health.rewound_to(then.health)
        trainer.drop_unsaved()
        # training continues with the rows after the spike
        trainer.rewind(checkpoint, replace(then, position=now.position, skipped=now.skipped, health=health))
        if run.world.rank == 0:
            counts = health.spikes, health.skipped
            add_rewind(run.directory, Rewind(then.step, then.position, now.position, now.step, result.loss, *counts))
        rows = now.position - then.position
        trainer.report.warn(f"rewinding to step {then.step}; skipping {rows} rows, up to row {now.position}")
        return ""
