"""Ranks on this machine, started by the deepspeed launcher."""

from pathlib import Path

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.progress import counted, in_time
from launch.supervise import commands, supervise
from pretrain.checkpoint.choose import is_valid, newest
from pretrain.config import RunConfig
from pretrain.run import lock, status
from pretrain.run.cpu_speed import seconds_left
from pretrain.run.hardware import count_gpus, free_port
from pretrain.trainer.validate import validate

_LONG = 7200.0  # s


def launch_local(
    path: Path, overrides: list[str], ranks: int | None, stop_at_step: int | None, fresh: bool = False
) -> int:
    """Checks the run file, starts `ranks` processes and waits for them; returns the exit code of the run.

    `fresh` starts a new run and moves an existing one in the run directory aside.
    """
    gpus = count_gpus()
    if gpus and ranks and ranks > gpus:
        has = f"this machine has {counted(gpus, 'GPU')}"
        raise UserError(f"--ranks: {ranks}, but {has}; DS_ACCELERATOR=cpu in the environment trains on the CPU")
    ranks = ranks or gpus or 1
    config = load(path, overrides, RunConfig)
    run = Path(config.run.directory)
    lock.check(run)
    # reports every problem once, before each rank would
    setup = validate(config, 0, ranks, None if fresh else newest(run))
    if setup.finished and setup.resume and is_valid(setup.resume):  # else the ranks resume from an earlier checkpoint
        print(setup.nothing_left)
        return 0
    if not gpus:
        left = seconds_left(config, setup.model, setup.lengths, setup.train_state.step, ranks)
        if left > _LONG:
            print(f"without a GPU, about {in_time(left)} to step {config.run.max_steps:,}; Ctrl-C saves", flush=True)
    if fresh and (aside := status.move_aside(run)):
        print(f"{run}: moved the existing run to {aside}", flush=True)
    arguments = [str(path), *overrides, *(["--stop-at-step", str(stop_at_step)] if stop_at_step else [])]
    options = commands.node_options({"localhost": ranks}, 0, "127.0.0.1", free_port())
    command = commands.deepspeed(options, arguments)
    return supervise(command, commands.environment(gpus, ranks), run, ranks, config.faults.dead_rank_seconds)
