"""Measures the speed of a run, and profiles its steps."""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from data_pipeline.foundation.atomic import temporary_path
from data_pipeline.loading.prefetch import fact
from pretrain.models.flops import Sizes, count_flops
from pretrain.training.callback import Callback
from pretrain.training.throughput import peak_flops
from pretrain.training.trainer import Trainer

_FIRST_PROFILED, _PROFILED = 10, 3  # steps since the start: earlier ones compile and fill caches; then as many more


class Speed(Callback):
    """The metrics `train/tokens_per_second`, `train/mfu` and others, over the steps since the last log line.

    train/seconds: wall-clock seconds of these steps, without evaluations and saves. train/processor_seconds: CPU
    seconds of all ranks in these steps, including the loading of rows unless `data.workers` load them.
    """

    def __init__(self) -> None:
        self._begin()

    def before_training(self, trainer: Trainer) -> None:
        self._peak = self._measured_peak(trainer)

    def _measured_peak(self, trainer: Trainer) -> float:
        return peak_flops(trainer.config, trainer.engine.device) * trainer.run.ranks

    def before_steps(self, trainer: Trainer) -> None:
        """What came before doesn't count as the time of a step."""
        self._last, self._processor = time.perf_counter(), time.process_time()

    def after_pause(self, trainer: Trainer) -> None:
        self.before_steps(trainer)

    def _begin(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._processor_seconds = 0.0
        self._waited = 0.0
        self._sizes: list[Tensor] = []  # of this rank's micro-batches

    def after_step(self, trainer: Trainer) -> None:
        now, processor = time.perf_counter(), time.process_time()
        self._seconds += now - self._last
        self._processor_seconds += processor - self._processor
        self._last, self._processor = now, processor
        self._steps += 1
        self._waited += trainer.waited
        self._sizes += [fact("example_sizes", batch) for batch in trainer.micro_batches]

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        """The time that this and the log take counts with the next step."""
        microseconds = self._sizes[0].new_tensor([round(1e6 * self._processor_seconds)])
        total = torch.cat([torch.stack(self._sizes).sum(dim=0), microseconds])
        dist.all_reduce(total)
        *counts, processor = total.tolist()
        examples, seconds = Sizes(*counts), self._seconds
        tokens = examples.inputs + (examples.targets if trainer.outline.decoder_reads_targets else 0)
        rate = count_flops(trainer.outline, examples) / seconds
        if rate > self._peak:  # measured while other programs ran
            self._peak = max(rate, self._measured_peak(trainer))
        metrics = {
            "train/tokens_per_second": tokens / seconds,
            "train/steps_per_second": self._steps / seconds,
            "train/mfu": rate / self._peak,
            "train/data_wait_fraction": self._waited / seconds,
            "train/seconds": seconds,
            "train/processor_seconds": processor / 1e6,
        }
        self._begin()
        return metrics


class Profiling(Callback):
    """`trainer.profile`: writes a trace of the kernels and operators of a few steps to RUN/profile/rank-00000.json, on
    each rank.

    If the run ends, stops or rewinds within these steps, the trace has the steps until then.
    """

    _profile: profile | None = None

    def before_training(self, trainer: Trainer) -> None:
        self._begin = trainer.state.step + _FIRST_PROFILED

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step == self._begin:
            activities = [ProfilerActivity.CPU]
            if trainer.engine.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after_step(self, trainer: Trainer) -> None:
        if trainer.last or trainer.stopping or trainer.step == self._begin + _PROFILED:
            self._write(trainer)

    def before_rewind(self, trainer: Trainer) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        target = trainer.run.directory / "profile" / f"rank-{trainer.run.rank:05d}.json"
        target.parent.mkdir(exist_ok=True)
        unnamed = temporary_path(target)
        self._profile.export_chrome_trace(str(unnamed))
        unnamed.rename(target)
        self._profile, self._begin = None, 0  # once: a run that has gone back takes the same steps again
