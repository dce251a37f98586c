"""Saves a run as named fragments of fp32 parameters and optimizer state, in safetensors and JSON files.

Each rank writes what it owns, by parameter name and offset. `rank-00000.safetensors` has a tensor "STATE/NAME" for each
fragment, where STATE is "parameter" or the optimizer's own name for a state, such as "exp_avg". `rank-00000.json`,
written after it, lists the fragments. Optimizer state in another shape than its parameter, such as row
means, is written whole by the rank that owns the parameter's first element. Nothing is pickled. A checkpoint appears
under its name when the files of all ranks are on disk.

Training goes on while its state is copied (`engine_state.py`). A thread on each rank writes the copy; that of rank 0
waits for the .json files of the other ranks. `latest` names a checkpoint, and older ones are removed, only when a
finite loss has been computed from its state. Ranks exchange failures between two steps, where they communicate anyway.
"""

import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from data_pipeline import tokenizer
from data_pipeline.foundation.atomic import commit, temporary_path
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.json_file import read_json
from data_pipeline.loading.stream import Skipped
from pretrain.checkpoint import CONFIG, rank_file
from pretrain.checkpoint.directory import all_steps, checkpoint_directory, set_latest
from pretrain.checkpoint.engine_state import Copy, HostCopies
from pretrain.checkpoint.index import File, Origin, Table, write_run_index
from pretrain.checkpoint.tensors import model_buffers, write_buffers, write_part
from pretrain.run import heartbeat, watchdog
from pretrain.run.train_state import TrainState
from pretrain.zero.engine import Engine
from pretrain.zero.ranks import from_rank_0, of_all_ranks

_POLL_SECONDS, _POLL_SECONDS_PER_RANK = 0.02, 0.001  # the files of many ranks make a long list
_ROUND_SECONDS = 1.0
_ABORTED = "another rank failed"
_PARTS = 2  # of a write: this rank's files, and the rest, which rank 0 does when all ranks' are there


@dataclass
class Saved:
    """The outcome of a save after `step`.

    Training paused for `pause_seconds`, the wait for the save before included. The write then took `write_seconds`, and
    `write_cpu_seconds` of rank 0. `gigabytes` is the size over all ranks. `error` is the reason if the save
    failed; the previous checkpoint is then untouched. `warnings` are problems around a save that succeeded.
    """

    directory: Path
    step: int
    pause_seconds: float = 0.0
    write_seconds: float = 0.0
    write_cpu_seconds: float = 0.0
    gigabytes: float = 0.0
    error: str | None = None
    warnings: list[str] = field(default_factory=list)


class Saver:
    """Saves a run while it trains, one checkpoint at a time. All ranks create one and call it together."""

    def __init__(self, engine: Engine, origin: Origin):
        self._engine, self._origin = engine, origin
        self._writing: _Writing | None = None
        self._copies: HostCopies | None = None

    @property
    def failed(self) -> bool:
        """True if the current save has failed on this rank. `wait` then ends it on all ranks."""
        return self._writing is not None and self._writing.error is not None

    def start(self, train_state: TrainState, weights: str | None = None) -> Saved | None:
        """Copies the state of the run and begins to write it. Returns the outcome of the previous save.

        `weights`: their fingerprint.
        """
        started = time.perf_counter()
        before = self.wait()
        train_state = replace(train_state, skipped=union(of_all_ranks(train_state.skipped)))
        self._copies = self._copies or HostCopies(self._engine)
        copy = self._copies.take()
        buffers = model_buffers(self._engine.deepspeed.module) if self._origin.rank == 0 else {}
        token = from_rank_0(uuid.uuid4().hex[:8])
        self._writing = _Writing(self._origin, train_state, token, copy, buffers, weights)
        copy.seconds += time.perf_counter() - started
        self._writing.start()
        return before

    def prove(self) -> None:
        """Notes that a finite loss was computed from the state that was last saved: `latest` may name it."""
        if self._writing is not None:
            self._writing.decide(proven=True)

    def done(self) -> Saved | None:
        """The outcome of the current save once it has succeeded. Only rank 0 returns it, and only once."""
        writing = self._writing
        if writing is None or self._origin.rank or writing.told or writing.is_alive() or writing.error is not None:
            return None
        return self._outcome(writing, None)

    def wait(self) -> Saved | None:
        """Waits for the current save to succeed or fail and returns its outcome, on every rank.

        Returns None if there is no save, or if `done` has returned its outcome. The ranks wait in rounds. In each they
        agree on whether any rank has failed and whether any still makes progress, so a save may take longer than
        `faults.hang_seconds`. The rank whose write hangs stays behind the others' marks.
        """
        if (writing := self._writing) is None:
            return None
        writing.decide(proven=False)  # unless it is proven already
        unfinished, failed, marked = 1, 0, 0
        with watchdog.slow_phase():
            while unfinished:
                writing.join(_ROUND_SECONDS)
                busy, ended = writing.is_alive(), writing.parts_ended  # in this order: both have ended then
                for _ in range(marked, ended):
                    heartbeat.mark()
                marked, advanced = ended, writing.advanced.is_set()
                writing.advanced.clear()
                ranks = torch.tensor([busy, self.failed, advanced], dtype=torch.int32, device=self._engine.device)
                dist.all_reduce(ranks)  # on how many each holds
                unfinished, failed, advanced_anywhere = ranks.tolist()
                if failed:
                    writing.abort.set()
                if advanced_anywhere:
                    watchdog.alive()
        # that of the first rank that didn't fail because of another
        errors = enumerate(of_all_ranks(writing.error) if failed else [])
        error = next((f"rank {rank}: {one}" for rank, one in errors if one and one != _ABORTED), None)
        self._writing = None
        return None if writing.told else self._outcome(writing, error)

    def _outcome(self, writing: "_Writing", error: str | None) -> Saved:
        writing.told, saved = True, writing.saved
        saved.pause_seconds = writing.copy.seconds
        if error:
            saved.error = f"{saved.directory}: can't be saved: {error}; the previous checkpoint is untouched"
            if self._origin.rank == 0:
                shutil.rmtree(writing.temporary, ignore_errors=True)
        return saved


class _Writing(threading.Thread):
    """Writes this rank's files of a checkpoint; on rank 0 it also completes the checkpoint.

    It is a daemon thread, so a process that ends with an error doesn't wait for it. `advanced` is set whenever the save
    makes progress, and `told` once its outcome has been returned.
    """

    def __init__(
        self,
        origin: Origin,
        train_state: TrainState,
        token: str,
        copy: Copy,
        buffers: Mapping[str, torch.Tensor],
        weights: str | None,
    ):
        super().__init__(name="checkpoint", daemon=True)
        self.origin, self.train_state = origin, train_state
        self.final = checkpoint_directory(origin.run, train_state.step)
        self.temporary = temporary_path(self.final, token)
        self.saved = Saved(self.final, train_state.step)
        self.error: str | None = None
        self.abort, self.advanced, self.told = threading.Event(), threading.Event(), False
        self.copy, self._buffers, self._weights = copy, buffers, weights  # training never changes buffers
        self.parts_ended = 0
        self._decided, self._proven = threading.Event(), False

    def decide(self, proven: bool) -> None:
        """Says whether the state has proven sound. Only the first call counts."""
        if not self._decided.is_set():
            self._proven = proven
            self._decided.set()

    def run(self) -> None:
        started = time.perf_counter()
        try:
            self.copy.finish()
            write_part(self.temporary, self.origin.rank, self.copy.image, self.copy.pieces, self.advanced.set)
            self.parts_ended = 1
            if self.origin.rank == 0:
                self._complete()
                self._decided.wait()
                if self._proven:
                    self._clean_up()
                else:
                    self.saved.warnings.append(f"{self.final}: no finite loss was computed from it yet; `latest` stays")
        except (OSError, FailedError) as error:
            self.error = (error.strerror if isinstance(error, OSError) else None) or str(error)
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            if self.error is not None:  # frees space at once; the rest is removed when every rank has ended
                (self.temporary / f"{rank_file(self.origin.rank)}.safetensors").unlink(missing_ok=True)
            self.saved.write_seconds = time.perf_counter() - started
            self.saved.write_cpu_seconds = time.thread_time()
            self.parts_ended = _PARTS

    def _complete(self) -> None:
        origin = self.origin
        write_common(origin, self._buffers, self.temporary)
        files: dict[str, File] = {}
        awaited = {f"{rank_file(rank)}.json": rank for rank in range(origin.ranks)}
        while awaited:
            # a list, since a network file system remembers for long that a file it was asked for didn't exist
            for name in awaited.keys() & {path.name for path in self.temporary.iterdir()}:
                written = read_json(self.temporary / name, Table).file
                assert written is not None
                files[f"{rank_file(awaited.pop(name))}.safetensors"] = written
                self.advanced.set()
            if awaited and self.abort.wait(_POLL_SECONDS + origin.ranks * _POLL_SECONDS_PER_RANK):
                raise FailedError(_ABORTED)
        index = write_run_index(self.temporary, files, origin, self.train_state, self._weights)
        self.saved.gigabytes = sum(file.bytes for file in index.files.values()) / 1e9
        # from an attempt that got this far, before the run was resumed from an earlier checkpoint
        replaced = self.final.rename(temporary_path(self.final)) if self.final.exists() else None
        commit(self.temporary, self.final)
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)

    def _clean_up(self) -> None:
        """Updates `latest` and removes old checkpoints. An error here doesn't undo the save.

        Checkpoints after this step, from an attempt before the run was resumed further back, stay: they will be
        overwritten. So does the one that this attempt has resumed from: it is known to be sound.
        """
        run, settings, warnings = self.origin.run, self.origin.settings, self.saved.warnings
        try:
            set_latest(run, self.train_state.step)
        except OSError as error:
            warnings.append(f"{run / 'checkpoints' / 'latest'}: can't be written: {error.strerror}")
            return  # `latest` may name an old checkpoint, so none may be removed
        done = [step for step in all_steps(run) if step <= self.train_state.step]
        every = settings.keep_every_steps
        for old in done[: -settings.keep_last]:
            if old == self.origin.resumed or (every and old % every == 0):
                continue
            try:
                directory = checkpoint_directory(run, old)
                # renamed first, so that the next start removes whatever can't be removed now
                shutil.rmtree(directory.rename(temporary_path(directory)), ignore_errors=True)
            except OSError as error:
                warnings.append(f"{checkpoint_directory(run, old)}: can't be removed: {error.strerror}")


def write_common(origin: Origin, buffers: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Writes the files that no rank owns: tokenizer, run file and the model's buffers."""
    tokenizer.save(origin.tokenizer, directory)
    shutil.copyfile(origin.run / CONFIG, directory / CONFIG)
    write_buffers(buffers, directory)


def union(by_rank: Iterable[list[Skipped]]) -> list[Skipped]:
    """The blocks that any rank has skipped. Each rank meets only the damage in its own share of the rows."""
    by_offset = {(one.corpus, one.shard, one.offset): one for blocks in by_rank for one in blocks}
    return [by_offset[key] for key in sorted(by_offset)]
