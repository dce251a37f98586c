"""Whether the run file is valid for these ranks and, without a GPU, how long the run takes."""

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted, duration
from launch.tools.doctor.findings import Finding, Settings
from pretrain.config import RunConfig
from pretrain.run import cpu_speed
from pretrain.run.hardware import count_gpus
from pretrain.trainer.preflight import preflight
from pretrain.trainer.validate import ValidatedRun

_LONG = 2 * 86400.0  # s


def check(settings: Settings) -> list[Finding]:
    path, *overrides = settings.run_file
    try:
        setup = preflight(load(path, overrides, RunConfig), settings.all_ranks, here=False)
    except UserError as error:
        return [Finding("run file", "fault", line) for line in str(error).splitlines()]
    ranks = counted(settings.all_ranks, "rank")
    found = [Finding("run file", "ok", f"{path} and its corpora are valid for {ranks}")]
    found += [Finding("run file", "warning", line) for line in setup.warnings]
    return found if count_gpus() else [*found, _time(setup, settings)]


def _time(setup: ValidatedRun, settings: Settings) -> Finding:
    """How long the run takes on the CPUs of machines like this one."""
    here = settings.ranks_here
    machines = max(1, settings.all_ranks // here)
    left = cpu_speed.seconds_left(setup.config, setup.model, setup.lengths, setup.train_state.step, here) / machines
    share = f"{cpu_speed.share(setup.model.width):.0%} of {cpu_speed.product_flops() / 1e9:,.0f} GFLOP/s"
    found = f"about {duration(left)} to step {setup.config.run.max_steps:,} without a GPU ({share})"
    if left < _LONG:
        return Finding("time", "ok", found)
    remedy = "take a smaller model, as launch init chooses one, fewer steps, or GPUs"
    return Finding("time", "warning", found, "", remedy)
