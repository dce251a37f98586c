"""Computes some steps twice, to find arithmetic that is silently wrong: `pretrain.faults.replay`."""

from contextlib import AbstractContextManager

from data_pipeline.foundation.errors import FailedError
from pretrain.checkpoint.directory import set_aside_after
from pretrain.faults.fingerprints import Finding
from pretrain.faults.replay import Replay, interval
from pretrain.run import outcome
from pretrain.trainer.callback import Callback, Trainer
from pretrain.zero.ranks import on_rank_0


class Replaying(Callback):
    """`faults.replay_every_steps`."""

    def before_training(self, trainer: Trainer) -> None:
        config, engine = trainer.config, trainer.engine
        every = interval(
            config.faults.replay_every_steps,
            trainer.layout.accumulation,
            trainer.run.ranks,
            config.checkpoint.every_steps,
        )
        repeats = engine.device.type == "cpu" or config.compute.deterministic
        self._replay = Replay(engine, every, trainer.report.machines, repeats)

    def before_steps(self, trainer: Trainer) -> None:
        self._replay.restart(trainer.state.step)

    def during_step(self, trainer: Trainer) -> AbstractContextManager[None]:
        before = trainer.before
        return self._replay.during(before.step, before.position, trainer.micro_batches)

    def after_step(self, trainer: Trainer) -> None:
        if self._replay.found:
            self._computed_wrong(trainer, self._replay.found)

    def _computed_wrong(self, trainer: Trainer, finding: Finding) -> None:
        """Raises FailedError, since gradients are wrong: those of this step, and maybe all since the last clean replay.

        The next attempt goes on from the newest checkpoint on disk that isn't later than that replay. Later ones are
        set aside. With replays at each save there are none. The oldest stays in any case: the run would begin anew.
        """
        if finding.rank is not None:
            outcome.faulty(finding.rank, trainer.run.rank)
        trainer.drop_unsaved()
        clean, run = self._replay.clean, trainer.run.directory
        aside = on_rank_0(lambda: set_aside_after(run, clean))
        renamed = f"; {', '.join(path.name for path in aside)}: set aside" if aside else ""
        raise FailedError(f"step {trainer.step}: {finding.what}; nothing was wrong at step {clean}{renamed}")
