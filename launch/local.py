"""Ranks on this machine, started by DeepSpeed's launcher."""

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted, duration
from launch import rank_commands
from launch.head import supervise
from launch.multi_node import Run
from pretrain.config import RunConfig
from pretrain.run.cpu_speed import seconds_left
from pretrain.run.hardware import count_gpus, free_port
from pretrain.trainer.preflight import is_finished, move_aside, preflight

_LONG = 7200.0  # s


def launch_local(run: Run, ranks: int | None) -> int:
    """Checks the run file, starts `ranks` processes and waits for them; returns the exit code of the run."""
    gpus = count_gpus()
    if gpus and ranks and ranks > gpus:
        has = f"this machine has {counted(gpus, 'GPU')}"
        raise UserError(f"--ranks: {ranks}, but {has}; DS_ACCELERATOR=cpu in the environment trains on the CPU")
    ranks = ranks or gpus or 1
    config = load(run.path, run.overrides, RunConfig)
    setup = preflight(config, ranks, run.fresh)
    if is_finished(setup):
        return 0
    if not gpus:
        left = seconds_left(config, setup.model, setup.lengths, setup.train_state.step, ranks)
        if left > _LONG:
            print(f"without a GPU, about {duration(left)} to step {config.run.max_steps:,}; Ctrl-C saves", flush=True)
    if run.fresh:
        move_aside(setup)
    options = rank_commands.node_options({"localhost": ranks}, 0, "127.0.0.1", free_port())
    command = rank_commands.deepspeed(options, run.arguments)
    # by default gloo listens at the address of the host's name
    environment = {"GLOO_SOCKET_IFNAME": "lo", **rank_commands.environment(gpus, ranks)}
    return supervise(command, environment, setup.directory, ranks, config.faults.dead_rank_seconds)
