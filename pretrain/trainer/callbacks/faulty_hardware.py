"""Finds machines that compute wrong, whose memory changes by itself, or that are slow: `pretrain.faults`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from data_pipeline.foundation.errors import FailedError
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.directory import set_aside_after
from pretrain.evaluation import record
from pretrain.faults import memory_at_rest, replay
from pretrain.faults.fingerprints import Finding, Fingerprints
from pretrain.faults.stragglers import Stragglers
from pretrain.models.flops import Sizes, count_flops
from pretrain.run import outcome, watchdog
from pretrain.trainer.callback import Callback, Trainer
from pretrain.zero.ranks import least, on_rank_0


def _blame(trainer: Trainer, finding: Finding) -> None:
    """Tells the supervisor which rank is faulty, if that is known."""
    if finding.rank is not None:
        outcome.faulty(finding.rank, trainer.run.rank)


class Replaying(Callback):
    """`faults.replay_every_steps`: computes some steps twice."""

    def before_training(self, trainer: Trainer) -> None:
        config, engine = trainer.config, trainer.engine
        every = replay.interval(
            config.faults.replay_every_steps,
            trainer.layout.accumulation,
            trainer.run.ranks,
            config.checkpoint.every_steps,
        )
        repeats = engine.device.type == "cpu" or config.compute.deterministic
        self._replay = replay.Replay(engine, every, trainer.report.machines, repeats)

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
        _blame(trainer, finding)
        trainer.drop_unsaved()
        clean, run = self._replay.clean, trainer.run.directory
        aside = on_rank_0(lambda: set_aside_after(run, clean))
        renamed = f"; {', '.join(path.name for path in aside)}: set aside" if aside else ""
        raise FailedError(f"step {trainer.step}: {finding.what}; nothing was wrong at step {clean}{renamed}")


class ComparingMemory(Callback):
    """`faults.checksum_every_steps`: compares weights and moments from one update to the next."""

    def before_training(self, trainer: Trainer) -> None:
        self._memory = memory_at_rest.MemoryAtRest(trainer.engine)
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
        return memory_at_rest.interval(-least(-self._memory.bytes(), device), flops, device.type)

    def _changed(self, trainer: Trainer, finding: Finding) -> None:
        """Raises FailedError: this step is wrong, and so may be a checkpoint of the step before.

        The next attempt goes on from the newest checkpoint on disk before them.
        """
        _blame(trainer, finding)
        trainer.finish_saving()
        trainer.drop_unsaved()
        run, clean = trainer.run.directory, trainer.step - 2
        on_rank_0(lambda: set_aside_after(run, clean))
        raise FailedError(
            f"step {trainer.step}: {finding.what}; if a callback does that, set faults.checksum_every_steps"
        )


class WeightComparison(Callback):
    """Compares the weights of all ranks before each save, and with those that were saved after each load."""

    def after_load(self, trainer: Trainer, checkpoint: Path) -> None:
        saved = checkpoint_index.read(checkpoint).weights
        if saved is not None and Fingerprints(trainer.engine).of_masters() != saved:
            raise FailedError(f"{checkpoint}: its weights aren't those that the run had when it saved them")

    def after_step(self, trainer: Trainer) -> None:
        if not trainer.saving:
            return
        with watchdog.slow_phase():
            fingerprints = Fingerprints(trainer.engine)
            self.compare(trainer, fingerprints)
            trainer.weights = fingerprints.of_masters()

    def compare(self, trainer: Trainer, fingerprints: Fingerprints) -> None:
        """Raises FailedError if a rank computes with weights that aren't the optimizer's: steps since then are wrong.

        The next attempt goes on from the last checkpoint on disk, before which they were right.
        """
        if difference := fingerprints.difference():
            _blame(trainer, difference)
            trainer.finish_saving()
            trainer.drop_unsaved()
            raise FailedError(f"step {trainer.step}: {difference.what}; its memory or its processor may be faulty")


class Straggling(Callback):
    """`faults.straggler_factor`: names the rank that the others wait for."""

    def before_training(self, trainer: Trainer) -> None:
        config, report = trainer.config, trainer.report
        self._stragglers = Stragglers(
            config.faults.straggler_factor,
            report.machines,
            record.directory(trainer.run.directory),
            config.data.remote,
            report.connects_to_mlflow,
        )

    def before_steps(self, trainer: Trainer) -> None:
        self._stragglers.restart()

    def after_step(self, trainer: Trainer) -> None:
        for findings in self._stragglers.step(trainer.step, trainer.engine.times):
            trainer.report.record_findings(trainer.step, findings)

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        return self._stragglers.metrics
