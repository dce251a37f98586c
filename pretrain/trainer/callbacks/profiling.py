"""Records the kernels and operators of a few steps, for chrome://tracing or Perfetto: `trainer.profile`."""

from torch.profiler import ProfilerActivity, profile

from data_pipeline.foundation.atomic import temporary_path
from pretrain.trainer.callback import Callback, Trainer

FIRST, LAST = 10, 13  # steps since the start: earlier ones compile and fill caches


class Profiling(Callback):
    """RUN/profile/rank-00000.json, of each rank."""

    _profile: profile | None = None

    def before_steps(self, trainer: Trainer) -> None:
        self._begin = trainer.state.step + FIRST

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step == self._begin:
            activities = [ProfilerActivity.CPU]
            if trainer.engine.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after_step(self, trainer: Trainer) -> None:
        if self._profile is None or not (trainer.step == self._begin + LAST - FIRST or trainer.last):
            return
        self._profile.stop()
        target = trainer.run.directory / "profile" / f"rank-{trainer.run.rank:05d}.json"
        target.parent.mkdir(exist_ok=True)
        unnamed = temporary_path(target)
        self._profile.export_chrome_trace(str(unnamed))
        unnamed.rename(target)
        self._profile = None
