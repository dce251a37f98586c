"""Starts a run: joins the ranks, checks the run file, builds the model and trains it. The file to read first."""

import contextlib
import gc
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pretrain.config import RunConfig
from pretrain.config.run_config import ComputeSection
from pretrain.engine.ranks import broadcast, communication_device, on_rank_0, process_group, run_on_all_ranks
from pretrain.engine.sharding import Sharding
from pretrain.hardware import cpu_multiplies_bf16, device_type, threads_per_rank
from pretrain.run import rank_logs, restarts, slurm, status
from pretrain.run.rank_environment import is_launched, local_world_size, rank_environment
from pretrain.run.train_state import TrainState
from pretrain.run.watchdog import watching
from pretrain.run.world import World
from pretrain.training.preflight import (
    NOT_FRESH,
    check_directory,
    check_fresh,
    device_problems,
    note_death,
    without_bf16,
)
from pretrain.training.prepare import PreparedRun, prepare
from pretrain.training.run_report import RunReport

if TYPE_CHECKING:
    from pretrain.engine.engine import Engine
    from pretrain.training.callback import Callback

# variables of cuBLAS and NCCL, with the values with which they sum in a fixed order
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def train(
    config: RunConfig,
    stop_at_step: int | None = None,
    fresh: bool = False,
    alone: bool = False,
    callbacks: "Sequence[Callback]" = (),
) -> int:
    """Trains from the latest checkpoint on; returns the exit code: 0 if finished, 75 if stopped after saving.

    A run stops on request, or if the store of a remote corpus doesn't answer.

    `fresh` starts a new run and renames an existing run directory. `alone`: run as a single rank in the caller's
    process, which ignores SLURM, starts no watchdog, and leaves Python's garbage collector alone. `callbacks` are
    called after the callbacks of the run file.
    """
    check_directory(Path(config.run.directory))
    if fresh:
        check_fresh(config)
    # before reading anything there, since another run may be writing it
    status.check_lock(Path(config.run.directory), restarts.is_restart())
    hang, start = config.faults.hang_timeout_seconds, config.faults.start_timeout_seconds
    store = config.data.cache.wait_seconds if config.data.remote else 0.0
    if not alone and not is_launched():
        os.environ |= slurm.rank_environment(os.environ)
    configure_arithmetic(config.compute)
    own = rank_environment().rank if is_launched() else 0
    if not own and not rank_logs.supervised() and status.CLEARED not in os.environ:
        status.clear_stop(Path(config.run.directory))  # left from an earlier start; from now on it is a request
    with (
        contextlib.nullcontext() if alone else watching(own, hang, start, store),
        process_group(config.run.cpu_threads, max(hang or 0.0, start) + store) as world,
    ):
        if not alone:
            gc.freeze()  # what has been imported stays; DeepSpeed would have Python search it for garbage a few times
        return train_in_group(world, config, stop_at_step, fresh, callbacks)


def train_in_group(
    world: World,
    config: RunConfig,
    stop_at_step: int | None = None,
    fresh: bool = False,
    callbacks: "Sequence[Callback]" = (),
) -> int:
    """`train` within a process group that exists already."""
    # DeepSpeed chooses its accelerator when it is imported, which must be in the process group
    from pretrain.engine.checkpoint.tensors import newest_verified
    from pretrain.training.callbacks import build_callbacks, stops
    from pretrain.training.trainer import Trainer

    requested = config
    if device_type() == "cpu" and not cpu_multiplies_bf16():
        config = without_bf16(requested)
    # other hosts may have other CPUs, and a network file system may show them an older run file
    config = broadcast(config, RunConfig)
    if world.rank == 0 and config != requested:
        print("precision: this CPU has no arithmetic for bf16, so the run computes in fp32")
    directory, last = Path(config.run.directory), min(config.run.max_steps, stop_at_step or config.run.max_steps)
    resume = None if fresh else newest_verified(directory)
    run = run_on_all_ranks(lambda: prepare(config, world, resume, device_problems(config)))
    # rank 0's, as with the checkpoint to resume from
    initial_weights, state = broadcast(run.initial_weights, Path | None), broadcast(run.train_state, TrainState)
    run = replace(run, initial_weights=initial_weights, train_state=state)
    if not rank_logs.supervised():  # a supervisor has looked before the ranks
        on_rank_0(lambda: note_death(directory), None)
    if fresh:
        on_rank_0(lambda: status.move_aside(directory), None)
    if on_rank_0(lambda: run.finished, bool):
        if world.rank == 0:
            print(run.nothing_left)
        return 0
    called = run_on_all_ranks(lambda: build_callbacks(config, stop_at_step, callbacks))
    with RunReport.open(run, stop_at_step) as report:
        if run.train_state.step >= last:  # killed after its last checkpoint, or asked to stop where it is
            return report.finish(run.train_state.step)
        stops.catch_signals()
        code = report.finish(Trainer(run, report, build_engine(run, report.warn), called).fit())
        stops.ignore_signals()
        if fresh and code:
            report.say(NOT_FRESH)
        return code


def build_engine(run: PreparedRun, warn: Callable[[str], None]) -> "Engine":
    """The model of the run under DeepSpeed. Its weights are drawn at random unless a checkpoint is loaded next."""
    # DeepSpeed chooses its accelerator when it is imported, which must be in the process group
    from pretrain.engine.construction import construct
    from pretrain.engine.engine import Engine

    sharding = Sharding.of(run.config, run.world.size)
    model = construct(run.config, run.model, sharding, skip_init=bool(run.resume or run.initial_weights))
    section = run.config.wrapper
    wrapper = section.load(run.config.precision, communication_device()) if section else None
    return Engine.initialize(model, run.config, sharding, wrapper=wrapper, warn=warn)


def configure_arithmetic(compute: ComputeSection) -> None:
    """Sets precision, determinism, memory and the cache of kernels for this process, before it uses a GPU.

    Environment variables that the user has set stay as they are.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"  # ragged batches would leave gaps between fixed ones
    if unset := [name for name in _CACHES if name not in os.environ]:
        cache = _kernel_cache()
        os.environ |= {name: str(cache / _CACHES[name]) for name in unset}
    # if it is unset, each rank starts a process per core of its node, 32 at most
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, threads_per_rank(local_world_size()))))
    torch.backends.cuda.matmul.allow_tf32 = compute.tf32
    torch.backends.cudnn.allow_tf32 = compute.tf32
    if compute.deterministic:
        os.environ |= {name: value for name, value in _DETERMINISTIC.items() if name not in os.environ}
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for debugging; slow


def _kernel_cache() -> Path:
    """This user's folder for compiled kernels, on a disk of the node. It is a new one if everybody may write to the
    usual folder, since kernels are code that runs."""
    usual = Path(tempfile.gettempdir(), f"encdec-pretrain-kernels-{os.getuid()}")
    with contextlib.suppress(FileExistsError):  # no folder
        usual.mkdir(mode=0o700, exist_ok=True)
    found = usual.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH:
        usual.chmod(0o700)
        return usual
    return Path(tempfile.mkdtemp(prefix=f"{usual.name}-"))
