"""Decides which nodes of a cluster get a unit. A unit that failed on a node is retried on another node. A node on which
several units failed, or that is unfit for any unit, is left out."""

import sys
from collections.abc import Mapping

_MOST_FAILURES = 3  # units that fail on a node before the node is left out
_told = set[tuple[str, str]]()  # unfit nodes that were named, and why: each stage tries these nodes again
Causes = dict[str, str]
"""Why each unit failed."""


class Nodes:
    """The nodes of a cluster during a stage. Prints a line when a node's first unit fails, and when a node is left out.

    A unit that fails on two nodes is itself at fault, and counts against neither node.

    Attributes:
        alive: the address of each node in the cluster, by id.
    """

    def __init__(self, stage: str):
        self._stage = stage
        self.alive: Mapping[str, str] = {}
        self.unfit: Causes = {}
        self._failed: dict[str, Causes] = {}  # by node
        self._tried: dict[str, set[str]] = {}  # by unit, the nodes on which it failed
        self._told: set[str] = set()

    @property
    def some_fit(self) -> bool:
        return not self.alive or bool(self.alive.keys() - self.unfit)

    @property
    def some_left(self) -> bool:
        return not self.alive or bool(self.alive.keys() - self.left_out)

    @property
    def left_out(self) -> frozenset[str]:
        failing = {node for node, units in self._failed.items() if len(units) >= _MOST_FAILURES}
        return frozenset({*self.unfit, *failing} & self.alive.keys())

    def add_unfit(self, node: str, why: str) -> None:
        """Leaves out a node that can't do any unit."""
        if node not in self.unfit:
            self.unfit[node] = why
            if (node, why) not in _told:
                _told.add((node, why))
                self._tell(f"{self.name(node)} is left out: {why}")

    def add_failure(self, node: str, unit: str, why: str) -> bool:
        """Notes that a unit failed on a node, perhaps because of the node; returns whether another node retries it."""
        tried = self._tried.setdefault(unit, set())
        others = tried - {node}
        tried.add(node)
        for other in others:
            self._failed.get(other, {}).pop(unit, None)
        if others or not self.alive.keys() - {node, *self.unfit}:
            return False
        failed = self._failed.setdefault(node, {})
        failed[unit] = why
        if node not in self._told:
            self._told.add(node)
            self._tell(f"{self.name(node)}: unit {unit} failed: {why}; another node tries it")
        if len(failed) == _MOST_FAILURES:
            self._tell(f"{self.name(node)} is left out: {len(failed)} units failed there, the last one: {why}")
        return True

    def avoided_by(self, unit: str) -> frozenset[str]:
        """The nodes that don't get a unit: nodes on which it failed, and nodes that are left out.

        If these are all nodes, it goes to a node that is left out for other units, else to one on which it failed.
        """
        tried = self._tried.get(unit, set())
        for avoided in ({*tried, *self.left_out}, {*tried, *self.unfit}, self.left_out):
            if self.alive.keys() - avoided:
                return frozenset(avoided & self.alive.keys())
        return frozenset(self.unfit.keys() & self.alive.keys())

    def others_may_try(self, unit: str) -> bool:
        """Whether a unit that fails on one node is retried on another."""
        return unit not in self._tried and len(self.alive.keys() - self.unfit) > 1

    def name(self, node: str) -> str:
        """ "node 10.0.0.7", with the beginning of its id if another node has the same address."""
        address = self.alive.get(node, node)
        alone = list(self.alive.values()).count(address) == 1
        return f"node {address}" if alone else f"node {address} ({node[:8]})"

    def why_left_out(self) -> list[str]:
        """A line for each node that is left out."""
        causes = {node: list(units.values())[-1] for node, units in self._failed.items() if units} | self.unfit
        return [f"{self.name(node)}: {causes[node]}" for node in sorted(self.left_out)]

    def _tell(self, line: str) -> None:
        print(f"warning: {self._stage}: {line}", file=sys.stderr, flush=True)
