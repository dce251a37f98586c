"""Saves checkpoints while a run trains: on disk, and in the memory of the nodes."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from data_pipeline.base.errors import FailedError
from data_pipeline.base.formatting import human_size
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.fingerprint import of_masters
from pretrain.engine.checkpoint.memory import MemoryCheckpoints, memory_bytes
from pretrain.engine.checkpoint.save import Saved, Saver
from pretrain.engine.ranks import all_gather, run_on_all_ranks
from pretrain.run import node_memory, watchdog
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer

_NOT_DUE = "memory_checkpoint_not_due"  # votes
_WRITING = "checkpoint_is_being_written"


class CheckpointsInMemory(Callback):
    """`checkpoint.memory_every_steps`: saves to the nodes' memory, from which a supervisor resumes the run. Off without
    a supervisor."""

    priority = -20
    _memory: MemoryCheckpoints | None = None
    _told = False

    def before_training(self, trainer: Trainer) -> None:
        every, node = trainer.config.checkpoint.memory_every_steps, node_memory.given()
        if every is None or not any(all_gather(node is not None, bool)):
            return
        world = trainer.run.world
        needed = memory_bytes(trainer.engine, len(world.nodes)) * len(world.on_node)
        try:
            there = run_on_all_ranks(lambda: _with_room(node, needed, world.node))
            self._memory = MemoryCheckpoints(trainer.engine, trainer.run.origin, there, every).open()
        except FailedError as error:
            trainer.report.warn(f"{error}: no checkpoints in memory")

    def votes(self, trainer: Trainer) -> Mapping[str, bool]:
        return {_NOT_DUE: self._memory is None or not self._memory.due(trainer.step)}

    def before_update(self, trainer: Trainer) -> None:
        if self._memory:
            self._memory.wait_for_staging()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._memory is None:
            return
        due = not result.votes[_NOT_DUE] and not trainer.rewinding
        if due and result.applied and not result.last:  # the last step goes to disk
            self._memory.take(trainer.state_to_save())
        if self._memory.problem and not self._told:
            trainer.report.warn(self._memory.problem)
            self._told = True

    def before_rewind(self, trainer: Trainer) -> None:
        if self._memory:
            self._memory.forget()

    def after_training(self, trainer: Trainer) -> None:
        if self._memory:
            self._memory.close()


def _with_room(node: Path | None, needed: int, name: str) -> Path:
    """The run's directory in the memory of this node, which has this `name`. Raises FailedError if there is none, or
    less than `needed` bytes are free."""
    if node is None:
        raise FailedError(f"{name}: has no file system in memory that this run may write to")
    try:
        node.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FailedError(f"{node}: can't be created: {error.strerror}") from None
    if shutil.disk_usage(node).free < needed:
        raise FailedError(f"{node}: has no {human_size(needed)} free, which checkpoints in memory need on each node")
    return node


class Checkpointing(Callback):
    """`checkpoint.every_steps`: saves to disk; also after the last step and on request."""

    priority = -40
    _saving = False  # on all ranks: a save has begun, and its outcome isn't known yet

    def before_training(self, trainer: Trainer) -> None:
        self._saver = Saver.open(trainer.engine, trainer.run.origin)

    def after_load(self, trainer: Trainer, checkpoint: Path) -> None:
        saved = checkpoint_index.read(checkpoint).weights
        if saved is not None and of_masters(trainer.engine) != saved:
            raise FailedError(f"{checkpoint}: its weights differ from those that the run saved")

    def votes(self, trainer: Trainer) -> Mapping[str, bool]:
        return {_WRITING: self._saving and self._saver.writes}

    def before_update(self, trainer: Trainer) -> None:
        if self._saving:
            self._saver.wait_for_staging()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.rewinding:
            return
        if self._saving:
            if result.applied:  # its loss was finite
                self._saver.prove()
            if not result.votes[_WRITING]:
                self._wait(trainer)
        if not result.due(trainer.config.checkpoint.every_steps):
            return
        for callback in trainer.callbacks.values():
            callback.before_save(trainer)
        with watchdog.slow_phase():
            self._saved(trainer, self._saver.start(trainer.state_to_save(), of_masters(trainer.engine)))
            self._saving = True
            if result.last or result.stopping:
                self._prove_last(trainer, result)
        trainer.resume_clocks()

    def finish_saving(self, trainer: Trainer) -> None:
        if trainer.engine.applied:  # the loss of the last step was finite
            self._saver.prove()
        self._wait(trainer)

    def before_rewind(self, trainer: Trainer) -> None:
        self._wait(trainer)

    def after_training(self, trainer: Trainer) -> None:
        self._wait(trainer, last=True)

    def _wait(self, trainer: Trainer, last: bool = False) -> None:
        self._saving = False
        self._saved(trainer, self._saver.wait(), last)

    def _saved(self, trainer: Trainer, saved: Saved | None, last: bool = False) -> None:
        """Reports a save that has ended. Raises FailedError if the save failed and the failure ends the run."""
        if saved is None:
            return
        if saved.error is not None:
            if last or trainer.config.checkpoint.on_failure == "stop":
                raise FailedError(saved.error)
            trainer.report.warn(f"{saved.error}; training continues (checkpoint.on_failure)")
        for callback in trainer.callbacks.values():
            callback.after_save(trainer, saved)

    def _prove_last(self, trainer: Trainer, result: StepResult) -> None:
        """Proves the last save by a loss, since no step follows. Raises FailedError if the loss isn't finite at the end
        of the run."""
        if trainer.engine.has_finite_loss(result.micro_batches[0]):
            self._saver.prove()
        elif result.last:
            raise FailedError(f"step {result.step}: the loss after the last step isn't finite")
