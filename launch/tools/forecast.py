"""Forecasts the time of a run, for the job of SLURM that trains the run."""

import contextlib
import math

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import duration
from launch.slurm import Job
from pretrain.config import RunConfig
from pretrain.device_speed import GPU_MFU, GPUS


def of_job(job: Job) -> str:
    """A line with the forecast time of a run beside the job's time limit; "" if there is no forecast.

    The forecast is the run file's `run.expected_hours`, or else the plan's for the cluster's `gpu`.
    """
    if not job.is_run:
        return ""
    config, ranks = load(job.path, job.overrides, RunConfig), job.nodes * job.head.per_node
    hours, source = config.run.expected_hours, "run.expected_hours"
    if hours is None and (gpu := job.cluster.gpu):
        from pretrain.tools import plan as planning  # PyTorch takes 2 s

        with contextlib.suppress(UserError):  # rows or vocabulary of a corpus that isn't built are unknown
            settings, row, file = planning.resolve_rows(config, job.path)
            plan = planning.Plan(settings, row, gpu, GPUS[gpu], ranks, GPU_MFU, 0.0, job.nodes, file)
            hours = plan.own.hours if plan.own.rows else None
            source = f"{ranks} × {gpu} at {GPU_MFU:.0%} MFU"
    if hours is None:
        return ""
    limit = job.time or job.cluster.time
    line = f"forecast: {duration(3600 * hours)} ({source}); "
    if limit is None:
        return f"{line}the job's time limit is the partition's"
    seconds = seconds_of(limit)
    if 3600 * hours <= seconds:
        return f"{line}the job's time limit is {limit}"
    jobs = math.ceil(3600 * hours / seconds)
    return f"{line}the job's time limit is {limit}, so that it takes {jobs} jobs: give --requeue, or --chain {jobs}"


def seconds_of(limit: str) -> float:
    """The seconds of a time limit in one of sbatch's forms: "1-12" is a day and a half, "90" 90 minutes, "1:30:00" an
    hour and a half, "1:30" a minute and a half. Infinite for "UNLIMITED" and for 0, which also means no limit."""
    if not limit[0].isdecimal():
        return math.inf
    days, has_days, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if has_days:  # hours, then minutes and seconds
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:  # minutes alone, or with seconds; or all three
        hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds or math.inf
