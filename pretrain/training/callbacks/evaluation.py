"""Runs the evaluations of a run."""

import contextlib
from contextlib import AbstractContextManager

from data_pipeline.loading.batches import Batch
from pretrain.evaluate import record
from pretrain.evaluate.hook import ValidationData
from pretrain.evaluate.hook_runner import HookRunner
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer


class EvaluationHooks(Callback):
    """`evaluation`: runs the hooks that are due."""

    priority = -30

    def before_training(self, trainer: Trainer) -> None:
        run, config = trainer.run, trainer.config
        skip_damage = config.data.on_damage == "skip"
        held_out = ValidationData(run.validation, run.training[0].tokenizer, skip_damage, trainer.layout)
        self._hooks = HookRunner(config.evaluation, held_out, record.directory(run.directory))
        self._periods = {one.every_steps for one in config.evaluation}

    def during_step(self, trainer: Trainer, micro_batches: list[Batch]) -> AbstractContextManager[None]:
        last = trainer.step == trainer.config.run.max_steps
        self._due = last or any(trainer.step % period == 0 for period in self._periods)
        return self._hooks.during(trainer.engine, trainer.step, last) if self._due else contextlib.nullcontext()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if not self._due or trainer.rewinding:
            return
        for findings in self._hooks.after(trainer.engine, result.step, result.last):
            trainer.report.record_findings(result.step, findings)
            for callback in trainer.callbacks.values():
                callback.after_log(trainer, findings.metrics)
            trainer.resume_clocks()
