"""Whether the run file is valid for these ranks and, without a GPU, how long the run takes."""

from pathlib import Path

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted, duration
from data_pipeline.foundation.memory import available
from launch.tools.doctor.findings import Finding, Settings
from pretrain import models
from pretrain.config import RunConfig
from pretrain.hardware import cpu_speed
from pretrain.hardware.machine import count_gpus
from pretrain.tools.plan.planner import memory_checkpoint_bytes
from pretrain.tools.plan.zero_memory import Parameters
from pretrain.trainer.preflight import preflight
from pretrain.trainer.validate import ValidatedRun

_LONG = 2 * 86400.0  # s


def check(settings: Settings) -> list[Finding]:
    path, *overrides = settings.run_file
    try:
        config = load(path, overrides, RunConfig)
        setup = preflight(config, settings.all_ranks, here=False, folder=Path(path).parent)
    except UserError as error:
        return [Finding("run file", "fault", line) for line in str(error).splitlines()]
    ranks = counted(settings.all_ranks, "rank")
    found = [Finding("run file", "ok", f"{path} and its corpora are valid for {ranks}")]
    found += [Finding("run file", "warning", line) for line in setup.warnings]
    if count_gpus():
        return [*found, _host_memory(setup, settings)]
    trained = setup.train_state.step >= setup.config.run.max_steps
    return found if trained else [*found, _time(setup, settings)]


def _host_memory(setup: ValidatedRun, settings: Settings) -> Finding:
    """Whether the state of the GPUs of a machine like this one fits into its memory, for checkpoints."""
    parameters = Parameters.of(models.outline(setup.model), setup.config)
    machines = max(1, settings.all_ranks // settings.ranks_here)
    copied, kept = parameters.state // machines, memory_checkpoint_bytes(parameters, machines)
    return host_memory(available(), copied, kept if setup.config.checkpoint.memory_every_steps else 0)


def host_memory(free: int, copied: int, kept: int) -> Finding:
    """`copied`: bytes of the copy that checkpoints on disk are written from. `kept`: of checkpoints in memory."""
    found = f"{free / 1e9:.1f} GB free"
    expected = f"{copied / 1e9:.1f} GB for the copy that checkpoints are written from"
    if copied > free:
        return Finding("host memory", "fault", found, expected, "free some, or take more machines")
    if copied + kept > free:
        expected += f" and {kept / 1e9:.1f} GB for checkpoints in memory"
        return Finding("host memory", "warning", found, expected, "set checkpoint.memory_every_steps: null")
    return Finding("host memory", "ok", found)


def _time(setup: ValidatedRun, settings: Settings) -> Finding:
    """How long the run takes on the CPUs of machines like this one."""
    here = settings.ranks_here
    machines = max(1, settings.all_ranks // here)
    rate = machines * cpu_speed.rank_flops(setup.config, here)
    left = cpu_speed.seconds_left(setup.config, setup.model, setup.lengths, setup.train_state.step, rate)
    share = f"{cpu_speed.share(setup.model.width):.0%} of {cpu_speed.product_flops() / 1e9:,.0f} GFLOP/s"
    found = f"about {duration(left)} to step {setup.config.run.max_steps:,} without a GPU ({share})"
    if left < _LONG:
        return Finding("time", "ok", found)
    remedy = "take a smaller model, as launch init chooses one, fewer steps, or GPUs"
    return Finding("time", "warning", found, "", remedy)
