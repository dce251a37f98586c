"""Ranks on this machine, started by DeepSpeed's launcher."""

import sys
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted
from launch import rank_commands
from launch.attempts import Run, run_attempts
from launch.head import LAUNCHERS_LOG, NodeRanks, stop_requests
from launch.rank_processes import RankProcesses
from pretrain.checkpoint import left_in_memory
from pretrain.config import RunConfig
from pretrain.hardware.machine import count_gpus, free_port
from pretrain.run import rank_logs
from pretrain.trainer.preflight import is_finished, move_aside, preflight, unchecked

_LOOPBACK = "127.0.0.1"


def launch_local(run: Run, ranks: int | None, dry_run: bool = False) -> int:
    """Checks the run file, starts `ranks` processes and waits for them; returns the exit code of the run.

    With `dry_run`, nothing is started, and corpora may be missing.
    """
    gpus = count_gpus()
    if gpus and ranks and ranks > gpus:
        has = f"this machine has {counted(gpus, 'GPU')}"
        raise UserError(f"--ranks: {ranks}, but {has}; DS_ACCELERATOR=cpu in the environment trains on the CPU")
    ranks = ranks or gpus or 1
    config = load(run.path, run.overrides, RunConfig)
    folder = run.path.parent
    if dry_run and unchecked(config, ranks, folder):
        return 0
    setup = preflight(config, ranks, run.fresh, may_train=dry_run, folder=folder)
    if dry_run:
        step, steps = setup.train_state.step, config.run.max_steps
        where = counted(ranks, "GPU" if gpus else "rank")
        print(f"{run.path} is valid: {where}, {setup.directory}, steps {step:,} to {steps:,}; nothing was started")
        return 0
    if is_finished(setup):
        return 0
    if run.fresh:
        move_aside(setup)
    # by default gloo listens at the address of the host's name
    environment = {"GLOO_SOCKET_IFNAME": "lo", **rank_commands.environment(gpus, ranks)}
    left_in_memory.remove_left()
    with stop_requests(setup.directory) as requests, LocalRanks(run, config, ranks, environment) as local:
        return run_attempts(local, run, config, requests).code


class LocalRanks:
    """The `ranks` of this machine, for one attempt of a run after another. None outlives the `with` block."""

    def __init__(self, run: Run, config: RunConfig, ranks: int, environment: dict[str, str]):
        self._run, self._ranks, self._environment = run, ranks, environment
        self._directory, self._hang_seconds = Path(config.run.directory), config.faults.hang_seconds

    def ready(self) -> bool:
        return True

    def start(self, logs: Path, environment: dict[str, str]) -> Sequence[NodeRanks]:
        environment = {**self._environment, **environment, rank_logs.SUPERVISED: str(logs)}
        options = rank_commands.node_options({"localhost": self._ranks}, 0, _LOOPBACK, free_port())
        command, log = rank_commands.deepspeed(options, self._run.arguments), logs / LAUNCHERS_LOG
        hang = self._hang_seconds
        return [RankProcesses(command, environment, self._ranks, log, run=self._directory, hang_seconds=hang)]

    def leave_out(self, lost: Sequence[str]) -> bool:
        return False  # this machine is the only one

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(self, *_: object) -> None:
        if kept := left_in_memory.release(self._directory):
            print(kept, file=sys.stderr, flush=True)
