"""Ranks on this machine, started by DeepSpeed's launcher."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted
from launch import rank_commands
from launch.attempts import Run, run_attempts, standby_began
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
        self._standby: RankProcesses | None = None
        self._waiting: Path | None = None  # the logs of the standby

    def ready(self) -> bool:
        return True

    def start(self, logs: Path, environment: dict[str, str]) -> Sequence[NodeRanks]:
        environment = {**environment, rank_logs.SUPERVISED: str(logs)}
        standby, waiting = self._standby, self._waiting
        if standby and waiting and standby.waits and standby_began(waiting, logs):
            self._standby = self._waiting = None
            standby.begin({**environment, "MASTER_PORT": str(free_port())}, logs / LAUNCHERS_LOG)
            return [standby]
        self._drop_standby()
        return [self._processes({**self._environment, **environment}, logs)]

    def prepare(self) -> None:
        self._waiting = rank_logs.standby_directory(self._directory)
        if self._waiting:
            environment = {**self._environment, rank_logs.SUPERVISED: str(self._waiting)}
            self._standby = self._processes(environment, self._waiting, standby=True)

    def leave_out(self, lost: Sequence[str]) -> bool:
        return False  # this machine is the only one

    def _processes(self, environment: dict[str, str], logs: Path, standby: bool = False) -> RankProcesses:
        options = rank_commands.node_options({"localhost": self._ranks}, 0, _LOOPBACK, free_port())
        command = rank_commands.deepspeed(options, self._run.arguments)
        return RankProcesses(
            command,
            environment,
            self._ranks,
            logs / LAUNCHERS_LOG,
            standby=standby,
            run=self._directory,
            hang_seconds=self._hang_seconds,
        )

    def _drop_standby(self) -> None:
        if self._standby:
            self._standby.end()
        if self._waiting:
            shutil.rmtree(self._waiting, ignore_errors=True)
        self._standby = self._waiting = None

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_standby()
        if kept := left_in_memory.release(self._directory):
            print(kept, file=sys.stderr, flush=True)
