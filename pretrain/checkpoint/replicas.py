"""Copies of ranks' shards in the memory of the next node, so that they outlive their own."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.checkpoint.directory import SHARD
from pretrain.checkpoint.shared_files import SharedFiles, slot_directory
from pretrain.run.node_memory import node_name

_MOST = 4096  # files of a slot


class Replicas:
    """Sends each rank's slots to a rank of the next node, and keeps those of the node before on this one.

    All ranks create one together, with `node`, the run's directory in the memory of their own. `exchange` may be called
    in a thread of its own: it has its own process group.
    """

    def __init__(self, node: Path):
        self._node = node
        self._group = dist.new_group(backend="gloo")
        self._to, self._sources = _neighbours()
        self._kept: dict[tuple[int, int], SharedFiles] = {}  # by rank and slot

    def exchange(self, slot: int, files: list[Tensor], shard: bytes) -> None:
        """Sends the `files` of this rank's `slot` and their description, and receives those of others."""
        own = [*files, torch.frombuffer(bytearray(shard), dtype=torch.uint8)]
        sizes = torch.zeros(_MOST, dtype=torch.int64)
        sizes[: len(own)] = torch.tensor([one.numel() for one in own])
        theirs = {source: torch.zeros_like(sizes) for source in self._sources}
        self._all([(self._to, sizes)], list(theirs.items()))
        received: list[tuple[int, Tensor]] = []
        described: dict[int, Tensor] = {}
        for source, lengths in theirs.items():
            *of_files, length = lengths[lengths > 0].tolist()
            (slot_directory(self._node, source, slot) / SHARD).unlink(missing_ok=True)
            received += [(source, one) for one in self._files(source, slot, of_files)]
            described[source] = torch.empty(length, dtype=torch.uint8)
            received.append((source, described[source]))
        self._all([(self._to, one) for one in own], received)
        for source, text in described.items():
            directory = slot_directory(self._node, source, slot)
            (directory / f".{SHARD}").write_bytes(text.numpy().tobytes())
            (directory / f".{SHARD}").rename(directory / SHARD)

    def _files(self, source: int, slot: int, sizes: list[int]) -> list[Tensor]:
        """This node's files for a slot of the rank `source`."""
        kept = self._kept.get((source, slot))
        if kept is None or [one.numel() for one in kept.files] != sizes:
            directory = slot_directory(self._node, source, slot)
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            kept = self._kept[source, slot] = SharedFiles(directory)
            for size in sizes:
                kept.add(size)
        return kept.files

    def _all(self, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]) -> None:
        """Sends and receives tensors, those from or to one rank in their order."""
        numbers: dict[int, int] = {}
        pending: list[Any] = []
        for number, (rank, tensor) in enumerate(sent):
            pending.append(dist.isend(tensor, rank, self._group, tag=number))
        for rank, tensor in received:
            number = numbers[rank] = numbers.get(rank, -1) + 1
            pending.append(dist.irecv(tensor, rank, self._group, tag=number))
        for one in pending:
            one.wait()


def several_nodes() -> bool:
    """True if the ranks are on more than one node."""
    return int(os.environ["LOCAL_SIZE"]) < dist.get_world_size()


def _neighbours() -> tuple[int, list[int]]:
    """The rank of the next node that keeps this rank's slots, and the ranks whose slots this rank keeps."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, node_name())
    nodes = list(dict.fromkeys(names))
    ranks = {node: [rank for rank, name in enumerate(names) if name == node] for node in nodes}
    to: dict[int, int] = {}
    for number, node in enumerate(nodes):
        following = ranks[nodes[(number + 1) % len(nodes)]]
        to |= {rank: following[index % len(following)] for index, rank in enumerate(ranks[node])}
    own = dist.get_rank()
    return to[own], [rank for rank, keeper in to.items() if keeper == own]
