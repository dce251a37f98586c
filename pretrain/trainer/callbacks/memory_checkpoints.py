"""Keeps the latest states in the memory of the nodes, from which the next attempt goes on:
`pretrain.checkpoint.memory`."""

import os
import shutil
from collections.abc import Mapping

from data_pipeline.foundation.formatting import human_size
from pretrain.checkpoint.memory import MemoryCheckpoints, memory_bytes
from pretrain.run import node_memory
from pretrain.trainer.callback import Callback, Trainer
from pretrain.zero.ranks import least

_HELD_BACK = "no checkpoint in memory yet"


class CheckpointsInMemory(Callback):
    """`checkpoint.memory_every_steps`, under a supervisor, which would go on from them."""

    _memory: MemoryCheckpoints | None = None
    _told = False

    def before_training(self, trainer: Trainer) -> None:
        every, node = trainer.config.checkpoint.memory_every_steps, node_memory.given()
        if every is None or node is None:
            return
        node.mkdir(mode=0o700, parents=True, exist_ok=True)
        needed = memory_bytes(trainer.engine) * int(os.environ["LOCAL_SIZE"])
        if least(shutil.disk_usage(node).free - needed, trainer.engine.device) < 0:
            trainer.report.warn(
                f"{node}: too small for checkpoints in memory, which need {human_size(needed)} of each node"
            )
            return
        self._memory = MemoryCheckpoints(trainer.engine, trainer.run.origin, node, every)

    def requests(self, trainer: Trainer) -> Mapping[str, bool]:
        return {_HELD_BACK: self._memory is None or not self._memory.due(trainer.step)}

    def after_step(self, trainer: Trainer) -> None:
        held_back = trainer.requested[_HELD_BACK] or not trainer.outcome.applied
        if self._memory is None:
            return
        if not held_back and not trainer.last:  # the last must be on disk
            self._memory.take(trainer.state_to_save())
        if self._memory.problem and not self._told:
            trainer.report.warn(self._memory.problem)
            self._told = True

    def before_going_back(self, trainer: Trainer) -> None:
        if self._memory:
            self._memory.forget()

    def after_training(self, trainer: Trainer) -> None:
        if self._memory:
            self._memory.close()
