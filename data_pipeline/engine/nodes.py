"""Decides which nodes of a cluster get a unit. A unit that failed on a node is retried on another node. A node on which
several units failed is left out for a while, and a node that is unfit for any unit is left out for good."""

import math
import sys
import time
from collections.abc import Callable, Mapping

from data_pipeline.base.formatting import masked

_MOST_FAILURES = 3  # units that fail on a node, none finished in between, before the node is left out
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds for which a failing node is left out; doubled while units fail there
SECONDS_TO_PASS = 60.0  # for what makes units fail on all nodes at once
_SECONDS_TO_GIVE_UP = 300.0  # if units fail on all nodes
_told = set[tuple[str, str]]()  # unfit nodes that were named, and why: each stage tries these nodes again
Causes = dict[str, str]
"""Why each unit failed, or why a unit failed on each node."""


class Nodes:
    """The nodes of a cluster during a stage. Prints a line when a node's first unit fails, and when a node is left out
    or takes units again.

    A node that finishes a unit is no longer blamed for units that failed there before. A unit that fails on two nodes
    counts against neither node, unless a third node finishes the unit. A node that is left out is tried again after a
    pause. If the last unit of every node has failed, no node is to blame: a shared file system may hang. For a minute,
    all nodes pause and no unit is to blame, either. After five minutes, no node is left.

    Attributes:
        alive: the address of each node in the cluster, by id.
    """

    def __init__(self, stage: str, clock: Callable[[], float] = time.monotonic):
        self._stage, self._clock = stage, clock
        self.alive: Mapping[str, str] = {}
        self.unfit: Causes = {}
        self._blamed: dict[str, Causes] = {}  # by node
        self._tried: dict[str, Causes] = {}  # by unit, the nodes on which it failed
        self._failing: Causes = {}  # by node, if the last unit failed there
        self._working = set[str]()  # nodes that finished their last unit
        self._pauses: dict[str, tuple[float, float]] = {}  # how long a failing node is left out, and until when
        self._all_fail_since: float | None = None
        self._told = set[tuple[str, str]]()

    @property
    def fit(self) -> frozenset[str]:
        return frozenset(self.alive.keys() - self.unfit)

    @property
    def left_out(self) -> frozenset[str]:
        now = self._clock()
        failing = {node for node, (_, until) in self._pauses.items() if now < until}
        return frozenset({*self.unfit, *failing} & self.alive.keys())

    @property
    def some_left(self) -> bool:
        return not self.alive or (self.may_recover and bool(self.alive.keys() - self.left_out))

    @property
    def may_recover(self) -> bool:
        """Whether a node will take units again, if now none does."""
        return bool(self.fit) and self._seconds_all_fail <= _SECONDS_TO_GIVE_UP

    @property
    def _seconds_all_fail(self) -> float:
        return 0.0 if self._all_fail_since is None else self._clock() - self._all_fail_since

    def add_unfit(self, node: str, why: str) -> None:
        """Leaves out a node that can't do any unit."""
        if node not in self.unfit:
            self.unfit[node] = why
            if (node, why) not in _told:
                _told.add((node, why))
                self._tell(f"{self.name(node)} is left out: {why}")

    def add_finish(self, node: str, unit: str) -> None:
        """Notes that a node has done a unit, whatever the result. Nodes on which the unit failed are to blame."""
        failed = self._tried.pop(unit, {})
        for other, why in failed.items() if len(failed) > 1 else ():
            self._blame(other, unit, why)
        self._blamed.pop(node, None)
        self._pauses.pop(node, None)
        self._failing.pop(node, None)
        self._working.add(node)
        self._all_fail_since = None
        if (node, "left out") in self._told:
            self._tell_once(node, "back", f"{self.name(node)} takes units again: it has finished unit {unit}")

    def add_failure(self, node: str, unit: str, why: str) -> bool:
        """Notes that a unit failed on a node, perhaps because of the node. Returns whether this try counts: False if
        all nodes fail at once."""
        tried = self._tried.setdefault(unit, {})
        tried[node] = why
        self._failing[node] = why
        self._working.discard(node)
        if not self.fit - {node}:
            return True
        if self.fit <= self._failing.keys():
            if self._all_fail_since is None:
                self._all_fail_since = self._clock()
            may_pass = self._seconds_all_fail <= SECONDS_TO_PASS
            if may_pass:
                line = f"units fail on all nodes, the last one: {why}; trying again for {SECONDS_TO_PASS:.0f} s"
                self._tell_once("", "all", line)
                for each in self.fit:
                    self._pause(each)
            return not may_pass
        if len(tried) > 1:
            for each in tried:
                self._blamed.get(each, {}).pop(unit, None)
            return True
        self._tell_once(node, "failed", f"{self.name(node)}: unit {unit} failed: {why}; another node tries it")
        self._blame(node, unit, why)
        return True

    def _blame(self, node: str, unit: str, why: str) -> None:
        blamed = self._blamed.setdefault(node, {})
        blamed[unit] = why
        if len(blamed) >= _MOST_FAILURES:
            self._pause(node)
            failed = f"{len(blamed)} units failed there, the last one: {why}"
            self._tell_once(node, "left out", f"{self.name(node)} is left out: {failed}")

    def _pause(self, node: str) -> None:
        """Leaves out a node, unless it is left out already: each time for twice as long."""
        pause, until = self._pauses.get(node, (_FIRST_PAUSE / 2, -math.inf))
        if self._clock() >= until:
            pause = min(2 * pause, _LONGEST_PAUSE)
            self._pauses[node] = pause, self._clock() + pause

    def avoided_by(self, unit: str, last: bool = False) -> frozenset[str]:
        """The nodes that don't get a unit: nodes on which it failed, and nodes that are left out.

        If that excludes every node: first a node that was left out because of other units, then a node on which the
        unit failed. The unit is blamed if its `last` try fails, so this try goes to a node that has finished its last
        unit, if there is one. A node of which nothing is known comes next: its workers may all die before they report.
        """
        tried, fit = self._tried.get(unit, {}).keys(), self.fit
        choices = [fit - tried - self.left_out, fit - tried, fit - self.left_out, fit]
        if last:
            working, unknown = fit & self._working, fit - self._failing.keys()
            choices = [working - tried, working, unknown - tried, unknown, *choices]
        for wanted in choices:
            if wanted:
                return frozenset(self.alive.keys() - wanted)
        return frozenset(self.alive)

    def name(self, node: str) -> str:
        """ "node 10.0.0.7", with the beginning of its id if another node has the same address."""
        address = self.alive.get(node, node)
        alone = list(self.alive.values()).count(address) == 1
        return f"node {address}" if alone else f"node {address} ({node[:8]})"

    def causes(self) -> list[str]:
        """A line for each node that is unfit, or on which the last unit failed."""
        causes = self._failing | self.unfit
        return [f"{self.name(node)}: {causes[node]}" for node in sorted(causes.keys() & self.alive)]

    def _tell_once(self, node: str, what: str, line: str) -> None:
        if (node, what) not in self._told:
            self._told.add((node, what))
            self._tell(line)

    def _tell(self, line: str) -> None:
        print(f"warning: {self._stage}: {masked(line)}", file=sys.stderr, flush=True)
