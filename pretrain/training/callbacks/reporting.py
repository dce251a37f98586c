"""Measures the speed of a run, logs metrics, runs evaluations, and prints progress."""

import contextlib
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.base.formatting import counted, duration, human_size
from data_pipeline.loading.batches import Batch
from data_pipeline.loading.prefetch import count_of
from pretrain.config import RunConfig
from pretrain.device_speed import gpu_of_device
from pretrain.engine.checkpoint.save import Saved
from pretrain.engine.memory import peak_memory
from pretrain.evaluate import record
from pretrain.evaluate.hook import ValidationData
from pretrain.evaluate.hook_runner import HookRunner
from pretrain.models.flops import Sizes, count_flops
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer

_TYPICAL_STEP = 3  # after a start, the first step that takes as long as later steps
_TYPICAL_WINDOW = 2  # after a start, the first log line whose steps don't include the first step
_OFF = 1.5  # a run is reported if it takes so many times more or less than expected
_LONG = 3600.0  # s: the end of a run that takes longer is forecast
_WIDTHS = (256, 512, 1024, 2048, 4096, 8192)  # of the timed matmuls
_TIMES = 3  # of each matmul
_KEEPS_BUSY = 0.01  # s: a matmul that takes as long keeps the device busy


class Speed(Callback):
    """The metrics `train/tokens_per_second`, `train/mfu` and others, over the steps since the last log line.

    train/mfu: model FLOPs utilization: the arithmetic that the examples of a step need (forward and backward, no
    recomputation, no padding), divided by what the devices can compute in that time at their peak.
    train/seconds: wall-clock seconds of these steps, without evaluations and saves. train/processor_seconds: CPU
    seconds of all ranks in these steps, including the loading of rows unless `data.workers` load them.
    """

    priority = 30

    def __init__(self) -> None:
        self._begin()

    def before_training(self, trainer: Trainer) -> None:
        self._peak = self._measured_peak(trainer)

    def _measured_peak(self, trainer: Trainer) -> float:
        return peak_flops(trainer.config, trainer.engine.device) * trainer.run.world.size

    def before_steps(self, trainer: Trainer) -> None:
        """Restarts the clock: the time until now doesn't count as the time of a step."""
        self._last, self._processor = time.perf_counter(), time.process_time()

    def after_pause(self, trainer: Trainer) -> None:
        self.before_steps(trainer)

    def _begin(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._processor_seconds = 0.0
        self._waited = 0.0
        self._sizes: list[Tensor] = []  # of this rank's micro-batches

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        now, processor = time.perf_counter(), time.process_time()
        self._seconds += now - self._last
        self._processor_seconds += processor - self._processor
        self._last, self._processor = now, processor
        self._steps += 1
        self._waited += result.waited
        self._sizes += [count_of("example_sizes", batch) for batch in result.micro_batches]

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        """The time that this and the logging take counts with the next step."""
        microseconds = self._sizes[0].new_tensor([round(1e6 * self._processor_seconds)])
        total = torch.cat([torch.stack(self._sizes).sum(dim=0), microseconds])
        dist.all_reduce(total)
        *counts, processor = total.tolist()
        examples, seconds = Sizes(*counts), self._seconds
        tokens = examples.inputs + (examples.targets if trainer.meta_model.decoder_reads_targets else 0)
        rate = count_flops(trainer.meta_model, examples) / seconds
        if rate > self._peak:  # the peak was measured while other programs ran
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


class Reporting(Callback):
    """`tracking.log_every_steps`: logs the metrics of all callbacks, to the terminal and to RUN/metrics.jsonl, which
    feeds MLflow."""

    priority = -10

    def before_training(self, trainer: Trainer) -> None:
        run, report = trainer.run, trainer.report
        config, layout, sharding = trainer.config, trainer.layout, trainer.engine.sharding
        on_cpu = trainer.engine.device.type == "cpu"
        threads = f"{counted(torch.get_num_threads(), 'thread')} a rank, " if on_cpu else ""
        report.say(
            f"{config.run.name}: {trainer.meta_model.num_parameters():,} parameters, {config.precision}, "
            f"ZeRO-{sharding.stage}, {counted(layout.ranks, 'rank')} × {layout.accumulation} × "
            f"{layout.micro_batch} rows, {threads}steps {run.train_state.step} to {config.run.max_steps}"
        )
        if sharding.reason:
            key = f"deepspeed.zero_optimization.stage: {config.zero_stage}"
            report.say(f"{key} runs as stage {sharding.stage}: {sharding.reason}")
        if run.initial_weights:
            report.say(f"starts from the weights in {run.initial_weights}")
        if config.data.mixing:
            shares = ", ".join(f"{100 * share:.3g} % of {name}" for name, share in run.shares)
            report.say(f"a mixture, in rows: {shares}")
        for line in run.warnings:
            report.warn(line)

    def before_steps(self, trainer: Trainer) -> None:
        self._first = trainer.state.step
        self._began = time.monotonic()
        self._windows = 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self._first + _TYPICAL_STEP:
            self.forecast(trainer, time.monotonic() - self._began)
        self._began = time.monotonic()
        if result.due(trainer.config.tracking.log_every_steps):
            self.log(trainer)

    def forecast(self, trainer: Trainer, seconds: float) -> None:
        """Prints when a long run will end if each step takes `seconds`. Its first log line may be hours away."""
        left = (trainer.config.run.max_steps - trainer.step) * seconds
        if left >= _LONG:
            end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left))
            trainer.report.say(f"a step takes {seconds:.3g} s: {duration(left)} left, until about {end}")

    def log(self, trainer: Trainer) -> None:
        """Logs the metrics since the last log line. train/gradient_norm: L2 norm of the last step's gradient before
        clipping; infinite if that step was skipped."""
        engine, callbacks = trainer.engine, trainer.callbacks.values()
        metrics = {"train/learning_rate": engine.learning_rate, "train/gradient_norm": engine.gradient_norm}
        for callback in callbacks:
            metrics |= callback.metrics(trainer)
        metrics = trainer.metrics.take() | metrics
        trainer.report.record(trainer.step, metrics)
        if trainer.run.world.rank == 0 and "train/loss" in metrics:
            steps = trainer.config.run.max_steps
            trainer.report.say(
                f"step {trainer.step}/{steps}  loss {metrics['train/loss']:.4f}  "
                f"lr {metrics['train/learning_rate']:.1e}  grad_norm {metrics['train/gradient_norm']:.3g}  "
                f"{_skipped_and_speed(metrics, steps - trainer.step, self._windows > 0)}".rstrip()
            )
        self._windows += 1
        if self._windows == _TYPICAL_WINDOW and (expected := trainer.config.run.expected_hours):
            self.compare(trainer, 3600 * expected, metrics.get("train/steps_per_second"))
        for callback in callbacks:
            callback.after_log(trainer, metrics)

    def compare(self, trainer: Trainer, expected: float, rate: float | None) -> None:
        """Prints a line if all steps will take much more or less than the `expected` seconds. `rate`: steps per
        second."""
        seconds = trainer.config.run.max_steps / rate if rate else expected
        if expected / _OFF <= seconds <= expected * _OFF:
            return
        cores, threads = counted(len(os.sched_getaffinity(0)), "core"), counted(torch.get_num_threads(), "thread")
        trainer.report.say(
            f"{'slower' if seconds > expected else 'faster'} than run.expected_hours: all steps take about "
            f"{duration(seconds)}, not {duration(expected)}; this machine has {cores}, a load of "
            f"{os.getloadavg()[0]:.1f}, and {threads} in each rank"
        )

    def after_save(self, trainer: Trainer, saved: Saved) -> None:
        if saved.error is not None:
            return
        names = ("pause_seconds", "write_seconds", "write_cpu_seconds", "gigabytes")
        trainer.report.record(saved.step, {f"checkpoint/{name}": getattr(saved, name) for name in names})
        trainer.report.say(
            f"saved {saved.directory}: {human_size(saved.gigabytes * 1e9)} in {saved.write_seconds:.2f} s "
            f"({saved.write_cpu_seconds:.2f} s of processor time); training paused for {saved.pause_seconds:.2f} s"
        )
        for line in saved.warnings:
            trainer.report.warn(line)

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        position = trainer.state.position
        trainer.metrics.record("train/peak_memory_gigabytes", peak_memory(trainer.engine.device) / 1e9, "max")
        return {"train/rows": position, "train/tokens": trainer.run.tokens(position)}


def _skipped_and_speed(metrics: dict[str, float], steps: int, typical: bool) -> str:
    """The last parts of a log line: skipped steps if there are any, the speed if it is measured, and the time left for
    `steps` if the speed is `typical`."""
    skipped = f"{number:.0f} skipped  " if (number := metrics.get("train/skipped_steps")) else ""
    if "train/steps_per_second" not in metrics:
        return skipped
    left = f"{duration(steps / metrics['train/steps_per_second'])} left" if typical else ""
    return f"{metrics['train/tokens_per_second']:,.0f} tok/s  {skipped}{left}"


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
        for evaluated in self._hooks.after(trainer.engine, result.step, result.last):
            trainer.report.record_result(result.step, evaluated)
            for callback in trainer.callbacks.values():
                callback.after_log(trainer, evaluated.metrics)
            trainer.resume_clocks()


def peak_flops(config: RunConfig, device: torch.device) -> float:
    """The peak FLOP/s of one rank's `device` in the arithmetic of the run: of a known GPU the vendor's dense figure,
    of any other device the speed of the fastest of several measured matmuls."""
    if device.type == "cuda" and (gpu := gpu_of_device(torch.cuda.get_device_name(device))):
        return gpu.flops("tf32" if config.precision == "fp32" and config.compute.tf32 else config.precision)
    return measured_peak(torch.bfloat16 if config.precision == "bf16" else torch.float32, device)


def measured_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest of several matmuls, which get wider until they keep the device busy."""
    best = 0.0
    generator = torch.Generator(device).manual_seed(0)  # leaves the global generator as it is
    for width in _WIDTHS:
        matrix = torch.rand(width, width, device=device, generator=generator).to(dtype)
        times: list[float] = []
        for _ in range(1 + _TIMES):
            started = time.perf_counter()
            result = matrix @ matrix
            if result.is_cuda:
                torch.cuda.synchronize(result.device)
            times.append(time.perf_counter() - started)
        seconds = min(times[1:])  # the first chooses a kernel
        best = max(best, 2 * width**3 / seconds)
        if seconds > _KEEPS_BUSY:
            break
    return best
