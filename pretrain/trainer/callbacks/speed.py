"""How fast a run is: tokens per second and model FLOPs utilisation (MFU); and what takes the time.

MFU is the arithmetic that the examples of a step need (forward and backward, no recomputation, no padding), divided by
what the devices could do in that time at their peak. The peak is the vendor's dense figure for known GPUs, and the
fastest of several measured matrix products for other devices.
"""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from data_pipeline.foundation.atomic import temporary_path
from data_pipeline.loading.batch_layout import IGNORE_INDEX, BatchLayout
from data_pipeline.loading.batches import Batch, TrainingBatches
from pretrain import models
from pretrain.config import RunConfig
from pretrain.functional.arithmetic import matmul
from pretrain.hardware import gpu_of_device
from pretrain.models.flops import Sizes, count_flops
from pretrain.trainer.callback import Callback, Trainer
from pretrain.trainer.validate import ValidatedRun

_WIDTHS = (256, 512, 1024, 2048, 4096, 8192)  # of the products that are timed
_LONG = 0.01  # s: a product that takes as long keeps the device busy
_PLACES, _ROWS_COUNTED = 8, 32  # rows at places all over a run, whose lengths stand for all
_TIMES = 3  # of a product


def peak_flops(config: RunConfig, device: torch.device) -> float:
    """The peak FLOP/s of one rank's `device` in the arithmetic of the run."""
    if device.type == "cuda" and (gpu := gpu_of_device(torch.cuda.get_device_name(device))):
        return gpu.flops("tf32" if config.precision == "fp32" and config.compute.tf32 else config.precision)
    return measured_peak(torch.bfloat16 if config.precision == "bf16" else torch.float32, device)


def measured_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest of some matrix products, wider and wider until they keep the device busy."""
    best = 0.0
    generator = torch.Generator(device).manual_seed(0)  # its own: the global generator is not touched
    for width in _WIDTHS:
        matrix = torch.rand(width, width, device=device, generator=generator).to(dtype)
        seconds = _seconds_of(matrix)
        best = max(best, 2 * width**3 / seconds)
        if seconds > _LONG:
            break
    return best


def _seconds_of(matrix: Tensor) -> float:
    """The shortest time of a square matrix's product with itself; the first, which isn't timed, chooses a kernel."""
    times = []
    for _ in range(1 + _TIMES):
        started = time.perf_counter()
        result = matmul(matrix, matrix)
        if result.is_cuda:
            torch.cuda.synchronize(result.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def sizes(batch: Batch) -> Tensor:
    """`Sizes` of a batch as a tensor (6,) int64, on its device and without waiting for it."""
    ids, labels = batch["encoder_input_ids"], batch["labels"]
    inputs = batch.get("encoder_segment_ids", batch.get("encoder_attention_mask", torch.ones_like(ids)))
    targets = (labels != IGNORE_INDEX) * batch.get("decoder_segment_ids", 1)
    most = max(ids.size(1), labels.size(1))
    input_lengths, target_lengths = _lengths(inputs, most), _lengths(targets, most)
    pairs = (input_lengths**2, target_lengths**2, input_lengths * target_lengths)
    return torch.stack([counts.sum() for counts in (input_lengths > 0, input_lengths, target_lengths, *pairs)])


def _lengths(segments: Tensor, most: int) -> Tensor:
    """(rows, most): tokens of each example of a row, [[1, 1, 1, 2, 2, 0]] -> [[3, 2, 0, …]]."""
    counts = segments.new_zeros(segments.size(0), most + 1)
    return counts.scatter_add_(1, segments, torch.ones_like(segments))[:, 1:]


def rows_per_step(config: RunConfig) -> float:
    """The mean over the run, whose batch may grow."""
    return sum(map(config.batch.rows, range(config.run.max_steps))) / config.run.max_steps


def flops_per_step(setup: ValidatedRun) -> float:
    """The mean FLOPs of a step of the run, forward and backward, counted on its own rows."""
    model, rows = models.outline(setup.model), rows_per_step(setup.config)
    batches = TrainingBatches(setup.stream, BatchLayout(0, 1, _ROWS_COUNTED, 1))
    whole = setup.config.run.max_steps * rows
    firsts = [int(whole * (place + 0.5) / _PLACES) for place in range(_PLACES)]
    counted = sum(count_flops(model, Sizes(*sizes(batches[first].batch).tolist())) for first in firsts)
    return rows * counted / (_PLACES * _ROWS_COUNTED)


_FIRST_PROFILED, _PROFILED = 10, 3  # steps since the start: earlier ones compile and fill caches; then as many more


class Speed(Callback):
    """The metrics `train/tokens_per_second`, `train/mfu` and their like, of the steps since the last metrics or pause.

    train/seconds, train/processor_seconds: of the steps since the last metrics, without evaluations and saves, by
    the clock, and of all ranks' processors with the loading of their rows unless `data.workers` do that.
    """

    _seconds = _processor_seconds = 0.0  # of the steps since the last metrics

    def before_training(self, trainer: Trainer) -> None:
        self._peak = peak_flops(trainer.config, trainer.engine.device) * trainer.run.ranks

    def before_steps(self, trainer: Trainer) -> None:
        """Begins a stretch of steps; what came before it doesn't count."""
        self._last, self._processor = time.perf_counter(), time.process_time()
        self._begin()

    def after_pause(self, trainer: Trainer) -> None:
        self.before_steps(trainer)

    def _begin(self) -> None:
        self._started, self._steps, self._waited = self._last, 0, 0.0
        self._sizes: list[Tensor] = []  # of this rank's micro-batches

    def after_step(self, trainer: Trainer) -> None:
        now, processor = time.perf_counter(), time.process_time()
        self._seconds += now - self._last
        self._processor_seconds += processor - self._processor
        self._last, self._processor = now, processor
        self._steps += 1
        self._waited += trainer.waited
        self._sizes += [sizes(batch) for batch in trainer.micro_batches]

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        """The time that this and the log take counts with the next step."""
        microseconds = self._sizes[0].new_tensor([round(1e6 * self._processor_seconds)])
        total = torch.cat([torch.stack(self._sizes).sum(dim=0), microseconds])
        dist.all_reduce(total)
        *counts, processor = total.tolist()
        examples, seconds = Sizes(*counts), self._last - self._started
        tokens = examples.inputs + (examples.targets if trainer.outline.decoder_reads_targets else 0)
        metrics = {
            "train/tokens_per_second": tokens / seconds,
            "train/steps_per_second": self._steps / seconds,
            "train/mfu": count_flops(trainer.outline, examples) / seconds / self._peak,
            "train/data_wait_fraction": self._waited / seconds,
            "train/seconds": self._seconds,
            "train/processor_seconds": processor / 1e6,
        }
        self._seconds = self._processor_seconds = 0.0
        self._begin()
        return metrics


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
