"""What a run measures, evaluates and says besides training."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch.profiler import ProfilerActivity, profile

from data_pipeline.foundation.atomic import temporary_path
from pretrain.checkpoint.save import Saved
from pretrain.evaluation import record
from pretrain.evaluation.hook import HeldOut
from pretrain.evaluation.hook_runner import HookRunner
from pretrain.trainer.callback import Callback, Trainer
from pretrain.trainer.throughput import ThroughputMeter, peak_flops
from pretrain.zero.memory import peak_memory

_TYPICAL_STEP = 3  # after a start, the first that takes as long as later ones
_FIRST_PROFILED, _PROFILED = 10, 3  # steps since the start: earlier ones compile and fill caches; then as many more


class Speed(Callback):
    """The metrics `train/tokens_per_second`, `train/mfu` and their like."""

    def before_training(self, trainer: Trainer) -> None:
        peak = peak_flops(trainer.config, trainer.engine.device) * trainer.run.ranks
        self._meter = ThroughputMeter(trainer.outline, peak)

    def before_steps(self, trainer: Trainer) -> None:
        self._meter.restart()

    def after_step(self, trainer: Trainer) -> None:
        self._meter.step(trainer.waited, trainer.micro_batches)

    def after_pause(self, trainer: Trainer) -> None:
        self._meter.restart()

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        return self._meter.take()


class Profiling(Callback):
    """`trainer.profile`: the kernels and operators of a few steps in RUN/profile/rank-00000.json, of each rank."""

    _profile: profile | None = None

    def before_steps(self, trainer: Trainer) -> None:
        self._begin = trainer.state.step + _FIRST_PROFILED

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step == self._begin:
            activities = [ProfilerActivity.CPU]
            if trainer.engine.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after_step(self, trainer: Trainer) -> None:
        if self._profile is None or not (trainer.last or trainer.step == self._begin + _PROFILED):
            return
        self._profile.stop()
        target = trainer.run.directory / "profile" / f"rank-{trainer.run.rank:05d}.json"
        target.parent.mkdir(exist_ok=True)
        unnamed = temporary_path(target)
        self._profile.export_chrome_trace(str(unnamed))
        unnamed.rename(target)
        self._profile = None


class Reporting(Callback):
    """`tracking.log_every_steps`: what all callbacks measure, on the terminal, in RUN/metrics.jsonl, and with it in
    MLflow."""

    def before_training(self, trainer: Trainer) -> None:
        trainer.report.announce(trainer.outline.num_parameters(), trainer.layout)

    def before_steps(self, trainer: Trainer) -> None:
        self._first, self._began = trainer.state.step, time.monotonic()

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == self._first + _TYPICAL_STEP:
            trainer.report.forecast(trainer.step, time.monotonic() - self._began)
        self._began = time.monotonic()
        if trainer.logging:
            self.log(trainer)

    def log(self, trainer: Trainer) -> None:
        metrics, callbacks = trainer.engine.take_metrics(), trainer.callbacks.values()
        for callback in callbacks:
            metrics |= callback.metrics(trainer)
        trainer.report.log(trainer.step, metrics)
        for callback in callbacks:
            callback.after_log(trainer, metrics)

    def after_save(self, trainer: Trainer, saved: Saved) -> None:
        if saved.error is None:
            trainer.report.saved(saved)

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        position = trainer.state.position
        return {
            "train/rows": position,
            "train/tokens": trainer.run.tokens(position),
            "train/peak_memory_gigabytes": peak_memory(trainer.engine.device) / 1e9,
        }


class EvaluationHooks(Callback):
    """The list `evaluation` of the run file: runs the hooks that are due."""

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
