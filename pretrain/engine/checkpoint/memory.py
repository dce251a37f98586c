"""Takes checkpoints in the memory of each node every few steps. After a failure, a run resumes from the newest.

A checkpoint in memory has the files that `save.py` writes, in the node's directory in a memory file system. Each rank's
file of tensors stays mapped, and the state is copied right into it. A rank has two such files and fills them in turn,
so that there is always a complete checkpoint. The ranks vote along with the sums of each step, so that all of them save
the same step. When all ranks have copied their state, the first rank of each node gives the checkpoint its name.

A lost node takes its memory with it. So on several nodes, each rank also sends its files to a rank of the next node,
which keeps them beside its own files (Wang et al. 2023, Gemini).
"""

import contextlib
import mmap
import os
import shutil
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from data_pipeline.base.atomic import write_json
from data_pipeline.base.json_file import read_valid_json
from pretrain.engine.checkpoint import rank_file
from pretrain.engine.checkpoint.directory import all_steps, checkpoint_directory
from pretrain.engine.checkpoint.engine_state import Copy, PinnedStaging, copy_bytes
from pretrain.engine.checkpoint.index import Files, MappedFile, Origin, write_run_index, write_table
from pretrain.engine.checkpoint.save import write_common, write_together
from pretrain.engine.checkpoint.tensors import model_buffers
from pretrain.engine.engine import Engine
from pretrain.engine.ranks import group_of_threads, on_rank_0, run_on_all_ranks
from pretrain.run.train_state import TrainState

_RUN_NAME = "memory.json"
_SLOTS = 2
_SHARE = 0.002  # of a step's time that a checkpoint may take on average
_MOST_BYTES = 1 << 30  # of a message


def interval(seconds: float, step: float) -> int:
    """Steps between checkpoints, 1000 at most. A checkpoint takes `seconds`, and a training step `step` seconds."""
    return max(1, min(1000, round(seconds / (_SHARE * step) + 0.5)))


def run_name(directory: Path) -> str | None:
    """The token that tells a run from other runs that were in its directory; None if there were never checkpoints in
    memory. RUN/checkpoints and a node's memory have it."""
    found = read_valid_json(directory / _RUN_NAME, dict[str, str])
    return found.get("run") if found else None


def memory_bytes(engine: Engine, nodes: int) -> int:
    """Approximate bytes of this rank's checkpoints in memory, in a run on so many nodes: a copy of its state in each
    slot. On a GPU there is also the page-locked copy, which isn't in the memory file system."""
    copies = 2 if nodes > 1 else 1  # a rank of another node, too
    return copies * _SLOTS * copy_bytes(engine)


class MemoryCheckpoints:
    """Takes checkpoints in memory while a run trains. All ranks call its methods together.

    `node`: the run's directory in this node's memory. `every`: steps between checkpoints; "auto": as few as take 0.2 %
    of the time.
    """

    _group: dist.ProcessGroup  # in which the threads that store communicate

    def __init__(self, engine: Engine, origin: Origin, node: Path, every: int | str):
        self._engine = engine
        self._origin = origin
        self._node = node
        self._auto, self._every = every == "auto", 1 if every == "auto" else int(every)
        self._first_of_node = origin.world.local_rank == 0
        page_locked = PinnedStaging(engine) if engine.device.type == "cuda" else None
        self._slots = [_Slot(engine, node, origin.world.rank, number, page_locked) for number in range(_SLOTS)]
        self._number = self._step = 0
        self._storing: threading.Thread | None = None
        self._began, self._seconds = time.monotonic(), 0.0
        self.problem: str | None = None
        """Why no more checkpoints are taken, once this rank or another can't take one."""
        self._neighbours = _neighbours(origin.world.rank, origin.world.nodes) if len(origin.world.nodes) > 1 else None

    def open(self) -> "MemoryCheckpoints":
        """Prepares the slots on each node, and returns this object. Raises FailedError if a node has no room."""
        name = on_rank_0(self._name_run, str)
        run_on_all_ranks(lambda: self._prepare(name))  # before the first slot is filled
        self._group = group_of_threads()
        return self

    def _name_run(self) -> str:
        checkpoints = self._origin.run / "checkpoints"
        if (name := run_name(checkpoints)) is None:
            checkpoints.mkdir(exist_ok=True)
            write_json(checkpoints / _RUN_NAME, {"run": (name := uuid.uuid4().hex)})
        return name

    def _prepare(self, name: str) -> None:
        """On the first rank of a node, removes all checkpoints but the one that this run has resumed from, and puts the
        files that no rank owns into each slot."""
        if not self._first_of_node:
            return
        origin = self._origin
        for left in (self._node / "checkpoints").glob("*"):
            if origin.resumed is None or left != checkpoint_directory(self._node, origin.resumed):
                shutil.rmtree(left, ignore_errors=True)
        for slot in self._slots:
            slot.directory.mkdir(parents=True)
            write_common(origin, model_buffers(self._engine.deepspeed.module), slot.directory)
        write_json(self._node / _RUN_NAME, {"run": name})

    def due(self, step: int) -> bool:
        """True if this rank is ready for a checkpoint after `step`: it is time, and the last checkpoint is stored."""
        stored = self._storing is None or not self._storing.is_alive()
        return self.problem is None and stored and step - self._step >= self._every

    def wait_for_staging(self) -> None:
        """Returns when the state has been copied and may change: call this before each update of the weights."""
        for slot in self._slots:
            slot.copies.wait()

    def take(self, train_state: TrainState) -> None:
        """Begins to copy the state of this rank. All ranks must be due, and the step must be in the file of metrics,
        since a run may resume after it."""
        started = time.perf_counter()
        if self._storing is not None:
            self.close()
            self._adjust(self._seconds)
        slot = self._slots[self._number % _SLOTS]
        self._number, self._step = self._number + 1, train_state.step
        copy: Copy | Exception
        try:
            slot.withdraw()
            copy = slot.copies.take()
        except (OSError, RuntimeError) as error:  # no room in the memory file system; no more page-locked memory
            copy = error
        self._seconds = time.perf_counter() - started
        arguments = (slot, copy, train_state)
        self._storing = threading.Thread(target=self._store, args=arguments, name="memory checkpoint", daemon=True)
        self._storing.start()

    def _store(self, slot: "_Slot", copy: "Copy | Exception", train_state: TrainState) -> None:
        """Completes the copy, and the checkpoint, if all ranks have completed theirs. Called in a thread."""
        try:
            files, state = write_together(
                lambda: slot.describe(self._origin.world.rank, copy), train_state, self._group
            )
            if self._neighbours:
                self._exchange(slot, files)
            run_on_all_ranks(lambda: self._name(slot, files, state), self._group)
        except Exception as error:  # no room, or a rank is gone
            self.problem = f"{self._node}: {' '.join(str(error).split())}: no further checkpoints in memory"
        self._seconds += time.thread_time() + (copy.seconds if isinstance(copy, Copy) else 0.0)

    def _name(self, slot: "_Slot", files: Files, state: TrainState) -> None:
        """Gives the checkpoint its name, on the first rank of each node."""
        slot.place = checkpoint_directory(self._node, state.step)
        if not self._first_of_node:
            return
        write_run_index(slot.directory, files, self._origin, state)
        slot.directory.rename(slot.place)
        for step in all_steps(self._node)[:-_SLOTS]:  # the checkpoint that was resumed from
            shutil.rmtree(checkpoint_directory(self._node, step), ignore_errors=True)

    def _exchange(self, slot: "_Slot", files: Files) -> None:
        """Sends this rank's files to a rank of the next node, and receives those that this rank keeps."""
        assert self._neighbours
        to, sources = self._neighbours
        incoming = run_on_all_ranks(lambda: {source: slot.room(source, files) for source in sources}, self._group)
        table = bytearray((slot.directory / f"{rank_file(self._origin.world.rank)}.json").read_bytes())
        sent = [torch.frombuffer(table, dtype=torch.uint8), *slot.files[self._origin.world.rank].split(_MOST_BYTES)]
        pending: list[Any] = [dist.isend(part, to, self._group, tag=number) for number, part in enumerate(sent)]
        for source, parts in incoming.items():
            pending += [dist.irecv(part, source, self._group, tag=number) for number, part in enumerate(parts)]
        for one in pending:
            one.wait()
        tables = {source: table for source, (table, *_) in incoming.items()}
        run_on_all_ranks(partial(slot.keep, tables), self._group)

    def _adjust(self, seconds: float) -> None:
        """Sets the number of steps between checkpoints from the cost of the last one."""
        now = time.monotonic()
        if self._auto and self._number > 1:  # the first one includes the start
            self._every = interval(seconds, (now - self._began) / self._every)
        self._began = now

    def forget(self) -> None:
        """Drops the checkpoints in memory, since the run is rewound to an earlier step."""
        self.close()
        dist.barrier()  # the files of all ranks are stored, on other nodes too
        for slot in self._slots:
            slot.withdraw()
        if self._first_of_node:
            for step in all_steps(self._node):  # the checkpoint that was resumed from
                shutil.rmtree(checkpoint_directory(self._node, step), ignore_errors=True)
        dist.barrier()
        self._step = 0

    def close(self) -> None:
        if self._storing is not None:
            self._storing.join()


class _Slot:
    """A file that this rank fills in turn with another, beside the files that it keeps for ranks of another node.

    The slot's files start in `directory` and move into a checkpoint directory; `place` is their current location.
    `page_locked`: pinned staging buffers, on GPUs, from which this rank's file is filled.
    """

    def __init__(self, engine: Engine, node: Path, rank: int, number: int, page_locked: PinnedStaging | None):
        self.directory = self.place = node / "checkpoints" / f".slot-{number}"
        self.files: dict[int, Tensor] = {}  # by rank: the bytes of the file of tensors, mapped
        self.copies = page_locked or PinnedStaging(engine, partial(self.file, rank))

    def file(self, rank: int, size: int) -> Tensor:
        """The bytes (size,) of the file of tensors of `rank`. Raises OSError if there is too little memory."""
        if rank not in self.files or self.files[rank].numel() != size:
            path = self.directory / f"{rank_file(rank)}.safetensors"
            path.unlink(missing_ok=True)
            self.files[rank] = memory_file(path, size)
        return self.files[rank]

    def room(self, rank: int, files: Files) -> list[Tensor]:
        """Memory for the files of a rank of another node: for the table of its fragments, and in parts for its
        tensors."""
        table = torch.empty(files[f"{rank_file(rank)}.json"].bytes, dtype=torch.uint8)
        return [table, *self.file(rank, files[f"{rank_file(rank)}.safetensors"].bytes).split(_MOST_BYTES)]

    def keep(self, tables: dict[int, Tensor]) -> None:
        """Writes the tables of ranks of another node. Their tensors are in their files already."""
        for rank, table in tables.items():
            (self.directory / f"{rank_file(rank)}.json").write_bytes(table.numpy().tobytes())

    def withdraw(self) -> None:
        """Renames the checkpoint back to its slot, so that nobody finds the checkpoint while it is overwritten. The
        first rank of the node that gets here renames it; for the others this is a no-op."""
        with contextlib.suppress(FileNotFoundError):
            self.place.rename(self.directory)
        self.place = self.directory

    def describe(self, rank: int, copy: Copy | Exception) -> Files:
        """Completes the copy and writes the table of this rank's fragments. Returns the descriptions of its files."""
        if isinstance(copy, Exception):
            raise copy
        copy.finish()
        file = self.file(rank, copy.image.numel())
        if file is not copy.image:
            file.copy_(copy.image)
        tensors = MappedFile(copy.image.numel(), xxhash.xxh3_128_hexdigest(copy.image.numpy().data))
        return {f"{rank_file(rank)}.safetensors": tensors, **write_table(self.directory, rank, copy.pieces)}


def memory_file(path: Path, size: int) -> Tensor:
    """The bytes (size,) of a new file in a memory file system. Raises OSError if the file system is full."""
    with path.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # otherwise writing to a full file system would raise SIGBUS
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


def _neighbours(own: int, nodes: tuple[tuple[int, ...], ...]) -> tuple[int, list[int]]:
    """The rank of the next node that keeps the files of the rank `own`, and the ranks whose files `own` keeps."""
    to: dict[int, int] = {}
    for node, following in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        to |= {rank: following[index % len(following)] for index, rank in enumerate(node)}
    return to[own], [rank for rank, keeper in to.items() if keeper == own]
