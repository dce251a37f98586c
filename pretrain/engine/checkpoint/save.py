"""Saves a run as named fragments of fp32 parameters and optimizer state, in safetensors and JSON files.

Each rank writes its own fragments, by parameter name and offset. `rank-00000.safetensors` has a tensor "STATE/NAME" for
each fragment. STATE is "parameter" or the optimizer's name of a state, such as "exp_avg". `rank-00000.json` lists the
fragments. Optimizer state in another shape than its parameter, such as row means, is written whole, by the rank that
owns the parameter's first element. Nothing is pickled. A checkpoint gets its name when the files of all ranks are on
disk.

Training continues while its state is copied (`engine_state.py`). A thread on each rank writes the copy and tells the
other ranks; the thread of rank 0 then completes the checkpoint. `latest` names the checkpoint, and older checkpoints
are removed, only after a finite loss has been computed from the saved state.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist

from data_pipeline.base.atomic import commit, temporary_path
from data_pipeline.base.errors import FailedError
from data_pipeline.corpus import tokenizer
from data_pipeline.loading.stream import each_once
from pretrain.engine.checkpoint import CONFIG
from pretrain.engine.checkpoint.directory import all_steps, checkpoint_directory, set_latest
from pretrain.engine.checkpoint.engine_state import Copy, PinnedStaging
from pretrain.engine.checkpoint.index import Files, Origin, write_run_index
from pretrain.engine.checkpoint.tensors import model_buffers, write_buffers, write_part
from pretrain.engine.engine import Engine
from pretrain.engine.ranks import all_gather, broadcast, first_value, group_of_threads, run_on_all_ranks, words
from pretrain.run import watchdog
from pretrain.run.train_state import TrainState

_ROUND_SECONDS = 1.0


@dataclass
class Saved:
    """The outcome of a save after `step`.

    Attributes:
        pause_seconds: how long training paused, including the wait for the save before.
        write_seconds: how long the write took after that.
        write_cpu_seconds: the CPU seconds of the write on rank 0.
        gigabytes: the size over all ranks.
        error: the reason if the save failed; the previous checkpoint is then untouched.
        warnings: problems around a save that succeeded.
    """

    directory: Path
    step: int
    pause_seconds: float = 0.0
    write_seconds: float = 0.0
    write_cpu_seconds: float = 0.0
    gigabytes: float = 0.0
    error: str | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass
class _Writing:
    """A save in progress on this rank.

    Attributes:
        parts_ended: number of finished parts: this rank's files, and the rest, which rank 0 does after all ranks'
        files. advanced: set whenever the save makes progress. proofs: the first is True if a finite loss was computed
        from the saved state.
    """

    saved: Saved
    copy: Copy
    error: str | None = None
    parts_ended: int = 0
    advanced: threading.Event = field(default_factory=threading.Event)
    proofs: SimpleQueue[bool] = field(default_factory=SimpleQueue)


class Saver:
    """Saves a run while it trains, one checkpoint at a time. All ranks call its methods together.

    `group`: in which the threads that write communicate.
    """

    def __init__(self, engine: Engine, origin: Origin, group: dist.ProcessGroup):
        self._engine = engine
        self._origin = origin
        self._group = group
        self._copies: PinnedStaging | None = None
        self._writing: _Writing | None = None
        self._thread = threading.Thread()
        self._steps: list[int] = []  # of the checkpoints that rank 0 has put in place

    @classmethod
    def open(cls, engine: Engine, origin: Origin) -> "Saver":
        """A saver with a group of its own. All ranks call this together."""
        return cls(engine, origin, group_of_threads())

    def wait_for_staging(self) -> None:
        """Returns when the state has been copied and may change: call this before each update of the weights."""
        if self._copies:
            self._copies.wait()

    @property
    def writes(self) -> bool:
        """True if the current save hasn't ended on this rank. If it has ended on all ranks, `wait` returns at once."""
        return self._thread.is_alive()

    def start(self, train_state: TrainState, weights: str | None = None) -> Saved | None:
        """Copies the state of the run and begins to write it. Returns the outcome of the previous save.

        `weights`: the fingerprint of the weights.
        """
        started = time.perf_counter()
        before = self.wait()
        copy = run_on_all_ranks(self._copied)
        buffers = model_buffers(self._engine.deepspeed.module) if self._origin.world.rank == 0 else {}
        final = checkpoint_directory(self._origin.run, train_state.step)
        temporary = broadcast(temporary_path(final), Path)
        self._writing = _Writing(Saved(final, train_state.step), copy)
        arguments = (self._writing, train_state, temporary, buffers, weights)
        # a daemon thread, so that a process that ends with an error doesn't wait for it
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        copy.seconds += time.perf_counter() - started
        self._thread.start()
        return before

    def _copied(self) -> Copy:
        """A copy of this rank's state. Raises FailedError if there is no memory for the copy."""
        self._copies = self._copies or PinnedStaging(self._engine)
        try:
            return self._copies.take()
        except RuntimeError as error:  # also if the system locks no more pages
            raise FailedError(f"the state can't be copied for a checkpoint: {error}") from error

    def prove(self) -> None:
        """Notes that a finite loss was computed from the last saved state, so that `latest` may name the checkpoint."""
        if self._writing is not None:
            self._writing.proofs.put(True)

    def wait(self) -> Saved | None:
        """Waits until the current save has succeeded or failed, and returns its outcome, on every rank; None if there
        is no save.

        The ranks wait in rounds. In each round, they agree on whether any rank still writes, and whether any makes
        progress, so that a save may take longer than `faults.hang_timeout_seconds`. A rank whose write hangs has fewer
        marks than the others.
        """
        if (writing := self._writing) is None:
            return None
        writing.proofs.put(False)  # has no effect if the save is proven already
        unfinished, marked = 1, 0
        with watchdog.slow_phase():
            while unfinished:
                self._thread.join(_ROUND_SECONDS)
                busy, ended = self._thread.is_alive(), writing.parts_ended  # in this order: both have ended if not busy
                for _ in range(marked, ended):
                    watchdog.mark()
                marked, advanced = ended, writing.advanced.is_set()
                writing.advanced.clear()
                ranks = torch.tensor([busy, advanced], dtype=torch.int32, device=self._engine.device)
                dist.all_reduce(ranks)  # the numbers of busy ranks, and of ranks that make progress
                unfinished, advanced_anywhere = ranks.tolist()
                if advanced_anywhere:
                    watchdog.alive()
        saved, self._writing = writing.saved, None
        error = first_value(writing.error)
        saved.pause_seconds = writing.copy.seconds
        if error:
            saved.error = f"{saved.directory}: can't be saved: {error}; the previous checkpoint is untouched"
        return saved

    def _write(
        self,
        writing: _Writing,
        train_state: TrainState,
        temporary: Path,
        buffers: Mapping[str, torch.Tensor],  # training never changes them
        weights: str | None,
    ) -> None:
        """Writes this rank's files; on rank 0, also completes the checkpoint. Called in a thread."""
        started = time.perf_counter()
        rank, saved = self._origin.world.rank, writing.saved

        def write_own() -> Files:
            writing.copy.finish()
            files = write_part(temporary, rank, writing.copy.image, writing.copy.fragments, writing.advanced.set)
            writing.parts_ended = 1
            return files

        try:
            files, train_state = _write_together(write_own, train_state, self._group)
            if rank == 0:
                _write_common(self._origin, buffers, temporary)
                index = write_run_index(temporary, files, self._origin, train_state, weights)
                saved.gigabytes = sum(file.bytes for file in index.files.values()) / 1e9
                _put_in_place(temporary, saved.directory)
                self._steps.append(saved.step)
                writing.advanced.set()
                if writing.proofs.get():
                    self._clean_up(saved)
                else:
                    saved.warnings.append(
                        f"{saved.directory}: no finite loss was computed from it yet; `latest` is unchanged"
                    )
        except Exception as error:
            writing.error = str(error) if isinstance(error, FailedError) else f"rank {rank}: {words(error)}"
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
        finally:
            saved.write_seconds, saved.write_cpu_seconds = time.perf_counter() - started, time.thread_time()
            writing.parts_ended = 2

    def _clean_up(self, saved: Saved) -> None:
        """Updates `latest` and removes old checkpoints. An error here doesn't undo the save.

        The checkpoint that this attempt has resumed from stays, since it is known to be sound. Checkpoints of later
        steps stay too: they are of an earlier attempt, whose course this run has left. They are overwritten, or removed
        once this run has passed their steps, as they would count as its own then.
        """
        run, settings = self._origin.run, self._origin.settings
        try:
            set_latest(run, saved.step)
        except OSError as error:
            saved.warnings.append(f"{run / 'checkpoints' / 'latest'}: can't be written: {error.strerror}")
            return  # `latest` may name an old checkpoint, so none may be removed
        resumed, every = self._origin.resumed, settings.keep_every_steps
        done = [step for step in all_steps(run) if step <= saved.step]
        own = [step for step in done if resumed is None or step <= resumed or step in self._steps]
        stay = {step for step in own if step == resumed or (every and step % every == 0)}
        for old in sorted({*done} - {*own[-settings.keep_last :]} - stay):
            try:
                directory = checkpoint_directory(run, old)
                # renamed first, so that the next start removes whatever can't be removed now
                shutil.rmtree(directory.rename(temporary_path(directory)), ignore_errors=True)
            except OSError as error:
                saved.warnings.append(f"{checkpoint_directory(run, old)}: can't be removed: {error.strerror}")


def _put_in_place(temporary: Path, final: Path) -> None:
    """Gives a complete checkpoint its name. A checkpoint of the same step, from an earlier attempt, is removed."""
    replaced = final.rename(temporary_path(final)) if final.exists() else None
    commit(temporary, final)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)


def _write_together(
    write: Callable[[], Files], train_state: TrainState, group: dist.ProcessGroup
) -> tuple[Files, TrainState]:
    """Writes this rank's files. Returns the files of all ranks, and the state with the damaged blocks that any rank has
    skipped.

    Called in a thread of each rank. Raises FailedError on all ranks if one can't write its files.
    """
    files = run_on_all_ranks(write, group)
    gathered = all_gather((files, train_state), tuple[Files, TrainState], group)
    # each rank skips only the damaged blocks in its own share of the rows
    skipped = each_once(one for _, state in gathered for one in state.skipped)
    everything = {name: file for of_rank, _ in gathered for name, file in of_rank.items()}
    return everything, replace(gathered[0][1], skipped=skipped)


def _write_common(origin: Origin, buffers: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Writes the files that no rank owns: tokenizer, run file and the model's buffers."""
    tokenizer.save(origin.tokenizer, directory)
    shutil.copyfile(origin.run / CONFIG, directory / CONFIG)
    write_buffers(buffers, directory)
