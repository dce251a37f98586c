"""Profiles steps of a run."""

import sys

from torch.profiler import ProfilerActivity, profile

from data_pipeline.base.atomic import temporary_path
from data_pipeline.loading.batches import Batch
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer

_FIRST_PROFILED = 10  # step since the start: earlier steps compile and fill caches
_PROFILED = 3  # further steps


class Profiling(Callback):
    """`trainer.profile`: writes a trace of the kernels and operators of a few steps to RUN/profile/rank-00000.json, on
    each rank.

    If the run ends, stops or rewinds within these steps, the trace has the steps until then.
    """

    priority = 20
    _profile: profile | None = None

    def before_training(self, trainer: Trainer) -> None:
        self._begin = trainer.state.step + _FIRST_PROFILED

    def before_step(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        if trainer.step == self._begin:
            activities = [ProfilerActivity.CPU]
            if trainer.engine.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.last or result.stopping or result.step == self._begin + _PROFILED:
            self._write(trainer)

    def before_rewind(self, trainer: Trainer) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        target = trainer.run.directory / "profile" / f"rank-{trainer.run.world.rank:05d}.json"
        try:
            target.parent.mkdir(exist_ok=True)
            unnamed = temporary_path(target)
            self._profile.export_chrome_trace(str(unnamed))
            unnamed.rename(target)
        except OSError as error:
            print(f"warning: trainer.profile: {target} isn't written: {error.strerror}", file=sys.stderr, flush=True)
        self._profile, self._begin = None, 0  # once: a run that is rewound takes the same steps again
