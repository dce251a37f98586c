"""The ranks of a run and their nodes, and which rank this process is."""

import os
import socket
from dataclasses import dataclass


def node_name() -> str:
    """The name of this node. A machine may be several nodes of SLURM."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class World:
    """The ranks of a run, as this rank sees them. `pretrain.engine.ranks.process_group` yields it.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        nodes: the ranks of each node.
    """

    rank: int
    size: int
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def on_this_node(cls, size: int = 1) -> "World":
        """The world of rank 0 of `size` ranks, all on this node: what a run is prepared with before it has ranks."""
        return cls(0, size, (tuple(range(size)),))

    @property
    def on_node(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return next(ranks for ranks in self.nodes if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """This rank's place among the ranks of its node. The rank of place 0 does what is done once on each node."""
        return self.on_node.index(self.rank)
