"""Training that Python code starts in its own process."""

import contextlib
import gc
import logging
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from data_pipeline.base import arguments
from data_pipeline.base.command import STOPPED
from data_pipeline.base.config_file import Given, as_overrides, load_with, path_of
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.processes import handlers_kept
from pretrain.config import RunConfig
from pretrain.config.run_config import ComputeSection
from pretrain.hardware import tell_of_spinning
from pretrain.run.rank_environment import is_launched
from pretrain.run_directory import Run, stop_step
from pretrain.tools.experiment import MOST_RUNS

if TYPE_CHECKING:
    import pandas as pd

    from pretrain.training.callback import Callback

_training = threading.Lock()  # held by the thread that trains: DeepSpeed's process group belongs to the whole process


def train(
    config: Given,
    /,
    *,
    stop_at_step: int | None = None,
    fresh: bool = False,
    callbacks: "Sequence[Callback | Mapping[str, Any]] | None" = None,
    **overrides: Any,
) -> Run:
    """Starts or resumes a run, trains it in this process as the only rank, and returns it. `launch.local` starts
    several ranks.

    `config`: a path, `configs:NAME` for a file that ships, or a file's keys and values. `stop_at_step` and `fresh` as
    in the command `pretrain train`. `overrides`: keys of the file; a section is a mapping, which is merged with the
    file's: `run={"max_steps": 100}`. `callbacks` replaces the file's list: entries as in the file, and objects of
    subclasses of `pretrain.training.callback.Callback`, which are called after the entries. The run's files don't name
    the objects, so a call that resumes the run gives them again.

    Ctrl-C saves and stops the run, and `train` returns the run. Before the first step, Ctrl-C raises KeyboardInterrupt,
    because there is nothing to save. SIGTERM, SIGHUP and SIGUSR1 save and stop, too, and are then sent to this process
    again. When `train` returns or raises, the following are as before: signal handlers, environment variables, global
    random generators, levels of loggers, and PyTorch's threads, precision and deterministic algorithms. No watchdog
    ends this process. During the run, numbers below 1e-38 count as 0, but not in threads that PyTorch has started
    before.

    Raises UserError for a wrong argument or config, and while another thread of this process trains. Raises FailedError
    if the run fails for a reason outside its code. Other errors are raised as they are.
    """
    stop = stop_step(stop_at_step)
    if isinstance(config, Mapping):
        callbacks = config.get("callbacks") if callbacks is None else callbacks
        config = {key: value for key, value in config.items() if key != "callbacks"}
    entries, objects = _entries_and_objects(callbacks)
    if entries is not None:
        overrides["callbacks"] = entries
    settings = load_with(config, overrides, RunConfig)
    tell_of_spinning()
    with _only_one(), contextlib.ExitStack() as afterwards, _caller_kept(settings.compute):
        # these set environment variables when they are imported
        from pretrain.training import run as training
        from pretrain.training.callbacks import stops

        afterwards.callback(stops.pass_on)
        training.train(settings, stop, fresh, alone=True, callbacks=objects)
    return Run(Path(settings.run.directory))


def experiment(
    directory: str | Path,
    /,
    *,
    seeds: int = 3,
    budget: str | None = None,
    at_once: int | None = None,
    out: str | Path | None = None,
    **overrides: Any,
) -> "pd.DataFrame":
    """Trains every run file of a folder with several seeds, prints a table that compares them, and returns the runs.

    `directory`: the folder, or `configs:NAME` for one that ships. `seeds`: runs of each file. `budget`: the length of
    each run: "400steps", "5%" or "2e13flops". `at_once`: runs that train at the same time; None: one per GPU, or one.
    `out`: the folder of the runs and the table; None: runs/NAME. `overrides`: keys of all run files.

    The same call resumes: finished runs are kept, and interrupted ones continue. The table that is returned has a row
    for each finished run, as `out`/runs.csv.

    Raises UserError for a wrong argument or run file, and FailedError if a run failed; the others are trained first.
    """
    import pandas as pd  # it takes 0.4 s

    from pretrain.tools.experiment import run_experiment  # MLflow takes seconds

    seeds = arguments.integer("seeds", seeds, 1, MOST_RUNS)
    if at_once is not None:
        at_once = arguments.integer("at_once", at_once, 1, MOST_RUNS)
    folder, changes = path_of(directory), as_overrides(overrides)
    place = arguments.local_path(out) if out else None
    if isinstance(folder, Mapping):
        raise UserError("directory: expected a folder of run files, got keys and values")
    outcome = run_experiment.experiment(folder, seeds, budget, at_once, place, changes)
    if outcome.code not in (0, STOPPED):
        raise FailedError(f"{outcome.out}: a run has failed; the log beside its directory says why")
    return pd.read_csv(outcome.out / "runs.csv")


def _entries_and_objects(callbacks: Any) -> tuple[Any, list[Any]]:
    """The entries of a run file among `callbacks`, and the others. Anything but a list is left to the file's check."""
    if not isinstance(callbacks, list | tuple):
        return callbacks, []
    objects = [one for one in callbacks if not isinstance(one, str | Mapping)]
    return [one for one in callbacks if isinstance(one, str | Mapping)], objects


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Within the block, no other call trains. Raises UserError if one does, or if this process is a rank already."""
    if not _training.acquire(blocking=False):
        raise UserError(
            "this process trains already, in another thread or around this call; train afterwards, or with "
            "launch.local, in processes of their own"
        )
    try:
        if is_launched():
            raise UserError(
                "RANK is set: either a launcher has started this process as a rank, which trains with `pretrain "
                "train`, or a worker imports a script that calls this function outside "
                '`if __name__ == "__main__":`'
            )
        if dist.is_available() and dist.is_initialized():
            raise UserError(
                "this process is in a process group already; end it with torch.distributed.destroy_process_group(), "
                "or train with launch.local, in processes of their own"
            )
        yield
    finally:
        _training.release()


@contextlib.contextmanager
def _caller_kept(compute: ComputeSection) -> Iterator[None]:
    """Restores after the block all process-wide state that a run with `compute` changes, and frees its memory."""
    with contextlib.ExitStack() as restored:
        restored.enter_context(handlers_kept())
        restored.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        restored.callback(_restore_environment, dict(os.environ))
        restored.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        restored.enter_context(warnings.catch_warnings())
        restored.callback(random.setstate, random.getstate())
        restored.callback(np.random.set_state, np.random.get_state())
        for logger in map(logging.getLogger, ("DeepSpeed", "mlflow")):
            restored.callback(logger.setLevel, logger.level)
        for restore in _of_torch(compute):
            restored.callback(restore)
        restored.callback(gc.collect)
        yield


def _restore_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ |= before


def _of_torch(compute: ComputeSection) -> Iterator[Callable[[], object]]:
    """For each setting of PyTorch that a run with `compute` changes, a function that sets its present value."""
    from pretrain.engine.construction import compiles  # reads environment variables that the caller sets before

    if compiles(compute):  # to read the limit imports the compiler, which takes a second
        compiler: Any = torch.compiler.config
        yield partial(setattr, compiler, "recompile_limit", compiler.recompile_limit)
    yield partial(torch.set_num_threads, torch.get_num_threads())
    yield partial(torch.set_flush_denormal, not torch.tensor(1e-40).mul(1).item())
    with contextlib.suppress(RuntimeError):  # the older names can't be read once the caller has set the newer ones
        yield partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    yield partial(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    yield partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns)
    functional: Any = torch.nn.functional
    yield partial(setattr, functional, "linear", functional.linear)  # ZeRO-3 replaces it for good
    fills: Any = torch.utils.deterministic  # PyTorch's stubs lack the name
    yield partial(setattr, fills, "fill_uninitialized_memory", fills.fill_uninitialized_memory)
    yield partial(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():
        yield partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        yield partial(torch.cuda.set_device, torch.cuda.current_device())
    else:  # its generators start from the CPU's seed
        yield partial(torch.cuda.manual_seed_all, torch.initial_seed())
