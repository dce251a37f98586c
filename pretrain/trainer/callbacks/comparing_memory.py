"""Compares weights and moments from one update to the next: `pretrain.faults.memory_at_rest`."""

from data_pipeline.foundation.errors import FailedError
from pretrain.checkpoint.directory import set_aside_after
from pretrain.faults.fingerprints import Finding
from pretrain.faults.memory_at_rest import MemoryAtRest, interval
from pretrain.models.flops import Sizes, count_flops
from pretrain.run import outcome
from pretrain.trainer.callback import Callback, Trainer
from pretrain.zero.ranks import least, on_rank_0


class ComparingMemory(Callback):
    """`faults.checksum_every_steps`."""

    def before_training(self, trainer: Trainer) -> None:
        self._memory = MemoryAtRest(trainer.engine)
        self._every = trainer.config.faults.checksum_every_steps
        trainer.engine.before_update = self._memory.compare

    def before_steps(self, trainer: Trainer) -> None:
        self._memory.forget()

    def after_step(self, trainer: Trainer) -> None:
        if finding := self._memory.finding():
            self._changed(trainer, finding)
        if self._every == "auto":  # known when the optimizer has its moments
            self._every = self._interval(trainer)
        if self._every and (trainer.step + 1) % self._every == 0:
            self._memory.take()

    def _interval(self, trainer: Trainer) -> int:
        layout, device = trainer.layout, trainer.engine.device
        rows = layout.micro_batch * layout.accumulation
        flops = rows * count_flops(trainer.outline, Sizes.of_example(*trainer.run.lengths))
        return interval(-least(-self._memory.bytes(), device), flops, device.type)

    def _changed(self, trainer: Trainer, finding: Finding) -> None:
        """Raises FailedError: this step is wrong, and so may be a checkpoint of the step before.

        The next attempt goes on from the newest checkpoint on disk before them.
        """
        assert finding.rank is not None
        outcome.faulty(finding.rank, trainer.run.rank)
        trainer.finish_saving()
        trainer.drop_unsaved()
        run, clean = trainer.run.directory, trainer.step - 2
        on_rank_0(lambda: set_aside_after(run, clean))
        raise FailedError(
            f"step {trainer.step}: {finding.what}; if a callback does that, set faults.checksum_every_steps"
        )
