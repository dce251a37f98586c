"""Runs the evaluation hooks that are due: `pretrain.evaluation.hook`."""

from contextlib import AbstractContextManager

from pretrain.evaluation import record
from pretrain.evaluation.hook import HeldOut
from pretrain.evaluation.hook_runner import HookRunner
from pretrain.trainer.callback import Callback, Trainer


class EvaluationHooks(Callback):
    """The list `evaluation` of the run file."""

    def before_training(self, trainer: Trainer) -> None:
        run, config = trainer.run, trainer.config
        skip_damage = config.data.on_damage == "skip"
        held_out = HeldOut(run.validation, run.training[0].tokenizer, skip_damage, trainer.layout)
        self._hooks = HookRunner(config.evaluation, held_out, record.directory(run.directory))

    def during_step(self, trainer: Trainer) -> AbstractContextManager[None]:
        return self._hooks.during(trainer.engine, trainer.step, trainer.last)

    def after_step(self, trainer: Trainer) -> None:
        for findings in self._hooks.after(trainer.engine, trainer.step, trainer.last):
            trainer.report.record_findings(trainer.step, findings)
            trainer.paused()
