"""Names the rank that the others wait for: `pretrain.faults.stragglers`."""

from collections.abc import Mapping

from pretrain.evaluation import record
from pretrain.faults.stragglers import Stragglers
from pretrain.trainer.callback import Callback, Trainer


class Straggling(Callback):
    """`faults.straggler_factor`."""

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
