"""Checkpoints in the memory of each node, taken every few steps: after a failure, a run goes on from the newest.

Each rank copies its state into files of a memory file system on its own node. It has two slots and fills one after the
other, so that one is whole at any moment. A slot counts once its shard.json is there, which names the step and has
checksums. Ranks take the same steps: they agree beside the sums that they exchange in each step anyway.

A node that is lost takes its memory with it. So on several nodes, each rank also sends its slot to a rank of the next
node, which keeps it beside its own (Wang et al. 2023, Gemini).
"""

import json
import os
import shutil
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist
import xxhash

from data_pipeline import tokenizer
from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.json_file import read_valid_json
from pretrain.checkpoint import CONFIG
from pretrain.checkpoint.buffers import model_buffers, write_buffers
from pretrain.checkpoint.copies import Copy, HostCopies
from pretrain.checkpoint.directory import SHARD
from pretrain.checkpoint.index import Identity, Origin
from pretrain.checkpoint.replicas import Replicas, several_nodes
from pretrain.checkpoint.shared_files import Place, SharedFiles, slot_directory
from pretrain.checkpoint.table import Piece
from pretrain.run.train_state import TrainState
from pretrain.zero.deepspeed_private import in_memory
from pretrain.zero.engine import Engine
from pretrain.zero.ranks import from_rank_0, on_rank_0

COMMON, ATTEMPT = "common", "attempt.json"
_RUN_NAME = "memory.json"
_SLOTS = 2
_SHARE = 0.01  # of a step's time that a checkpoint may take on average


@dataclass(frozen=True)
class Shard:
    """The content of shard.json: the state of one rank after a step.

    `files` has the checksums of the slot's files, `checksum` is that of everything else here.
    """

    token: str
    rank: int
    train_state: TrainState
    consumed: list[int]
    fragments: dict[str, Piece]
    tensors: dict[str, Place]
    files: list[str]
    checksum: str = ""

    def own_checksum(self) -> str:
        """The value of `checksum` unless a bit has flipped since the shard was written."""
        return xxhash.xxh3_128_hexdigest(json.dumps(asdict(replace(self, checksum=""))).encode())


@dataclass(frozen=True)
class MemoryRun:
    """The facts that all shards of an attempt have in common; `token` names the attempt, `run` its run."""

    run: str
    token: str
    world_size: int
    zero_stage: int
    identity: Identity
    config_fingerprint: str


def run_name(run: Path) -> str | None:
    """The token that tells this run from others that were in its directory; None if it never had checkpoints in
    memory."""
    found = read_valid_json(run / "checkpoints" / _RUN_NAME, dict[str, str])
    return found.get("run") if found else None


def memory_bytes(engine: Engine) -> int:
    """About the bytes that checkpoints in memory take for this rank: its parameters and two moments, in each slot."""
    elements = sum(fragment.size for owned in in_memory(engine.deepspeed) for fragment in owned)
    copies = 2 if several_nodes() else 1  # those of another node's rank too
    return copies * _SLOTS * 3 * 4 * elements


class MemoryCheckpoints:
    """Takes checkpoints in memory while a run trains. All ranks create one and call it together.

    `node` is the run's directory in this node's memory. `every`: steps from one to the next; "auto": as few as cost
    less than one percent of the time. `problem`: why this rank takes no more of them, once it can't.
    """

    def __init__(self, engine: Engine, origin: Origin, node: Path, every: int | str):
        self._engine, self._origin, self._node = engine, origin, node
        self._auto, self._every = every == "auto", 1 if every == "auto" else int(every)
        self._token = from_rank_0(uuid.uuid4().hex)
        self._run = on_rank_0(self._named_run)
        self._slots: list[_Slot] = []
        self._number = self._step = 0
        self._storing: _Storing | None = None
        self._began = time.monotonic()
        self.problem: str | None = None
        if int(os.environ["LOCAL_RANK"]) == 0:
            self._describe()
        self._replicas = Replicas(node) if several_nodes() else None
        dist.barrier()  # before the first slot is made

    def _named_run(self) -> str:
        run = self._origin.run
        if (name := run_name(run)) is None:
            name = uuid.uuid4().hex
            (run / "checkpoints").mkdir(exist_ok=True)
            write_json(run / "checkpoints" / _RUN_NAME, {"run": name})
        return name

    def _describe(self) -> None:
        """Writes what all ranks' shards have in common, on each node."""
        origin, here = self._origin, self._node / COMMON
        for left in (here, *self._node.glob("rank-*")):  # of the attempt before, from which this one has resumed
            shutil.rmtree(left, ignore_errors=True)
        here.mkdir(parents=True)
        tokenizer.save(origin.tokenizer, here)
        shutil.copyfile(origin.run / CONFIG, here / CONFIG)
        write_buffers(model_buffers(self._engine.deepspeed.module), here)
        described = MemoryRun(
            self._run, self._token, origin.ranks, origin.zero_stage, origin.identity, origin.config_fingerprint
        )
        write_json(self._node / ATTEMPT, asdict(described))

    def due(self, step: int) -> bool:
        """True if this rank would take a checkpoint after `step`: it is time, and the one before is stored."""
        stored = self._storing is None or not self._storing.is_alive()
        return self.problem is None and stored and step - self._step >= self._every

    def take(self, train_state: TrainState) -> None:
        """Begins to copy the state of this rank. The ranks must have agreed that all are due, and the step must be in
        the log of metrics: a run may go on after it."""
        started = time.perf_counter()
        if self._storing is not None:
            self.close()
            self.problem = self._storing.problem
            self._adjust(self._storing.seconds)
        if len(self._slots) < _SLOTS:
            self._slots.append(_Slot(self._engine, self._node, self._origin.rank, len(self._slots), self._replicas))
        slot = self._slots[self._number % _SLOTS]
        self._number, self._step = self._number + 1, train_state.step
        slot.invalidate()
        try:
            copy = slot.copies.take()
        except OSError as error:
            self.problem = f"{self._node}: {error.strerror}: no further checkpoints in memory"
            return
        consumed = self._origin.mixture.consumed(train_state.position)
        shard = Shard(self._token, self._origin.rank, train_state, consumed, {}, {}, [])
        self._storing = _Storing(slot, copy, shard)
        self._storing.seconds += time.perf_counter() - started
        self._storing.start()

    def _adjust(self, seconds: float) -> None:
        """Sets the number of steps between checkpoints from the cost of the last one."""
        now = time.monotonic()
        if self._auto and self._number > 1:  # the first one includes the start
            between = (now - self._began) / self._every
            self._every = max(1, min(1000, round(seconds / (_SHARE * between) + 0.5)))
        self._began = now

    def forget(self) -> None:
        """Drops what is in memory: the run has gone back to a step before it."""
        self.close()
        dist.barrier()  # all ranks' slots, and what other nodes keep of them, are stored
        if int(os.environ["LOCAL_RANK"]) == 0:
            for shard in self._node.glob(f"rank-*/{SHARD}"):
                shard.unlink()
            shutil.rmtree(self._node / "checkpoints", ignore_errors=True)  # made of such at a start
        dist.barrier()
        self._step = 0

    def close(self) -> None:
        if self._storing is not None:
            self._storing.join()


class _Slot:
    """A slot of this rank: its memory, and what copies the rank's state there."""

    def __init__(self, engine: Engine, node: Path, rank: int, number: int, replicas: Replicas | None):
        directory = slot_directory(node, rank, number)
        directory.mkdir(parents=True)
        self.directory, self._files = directory, SharedFiles(directory)
        self._number, self._replicas = number, replicas
        self.copies = HostCopies(engine, self._files.tensor)

    def invalidate(self) -> None:
        (self.directory / SHARD).unlink(missing_ok=True)

    def commit(self, shard: Shard, copy: Copy) -> None:
        shard = replace(
            shard,
            fragments=copy.pieces,
            tensors={name: self._files.place(tensor) for name, tensor in copy.tensors.items()},
            files=self._files.checksums(),
        )
        described = json.dumps(asdict(replace(shard, checksum=shard.own_checksum()))).encode()
        (self.directory / f".{SHARD}").write_bytes(described)
        (self.directory / f".{SHARD}").rename(self.directory / SHARD)
        if self._replicas:
            self._replicas.exchange(self._number, self._files.files, described)


class _Storing(threading.Thread):
    """Completes the copy of a rank's state and commits its slot. `seconds`: what it has cost so far."""

    def __init__(self, slot: _Slot, copy: Copy, shard: Shard):
        super().__init__(name="memory checkpoint", daemon=True)
        self.seconds = 0.0
        self.problem: str | None = None
        self._slot, self._copy, self._shard = slot, copy, shard

    def run(self) -> None:
        self._copy.finish()
        try:
            self._slot.commit(self._shard, self._copy)
        except (OSError, RuntimeError, ValueError) as error:  # no room, or a rank is gone, or this rank's group
            self.problem = " ".join(str(error).split())
        self.seconds += self._copy.seconds + time.thread_time()
