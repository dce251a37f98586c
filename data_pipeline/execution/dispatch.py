"""Hands units to the workers of a Ray cluster, takes what they return, and tries again what failed or was lost."""

import contextlib
import queue
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import ray

from data_pipeline.execution.attempt import SECONDS_TO_ANSWER, Failed, Needs, attempt
from data_pipeline.execution.nodes import Nodes
from data_pipeline.foundation.errors import FailedError, NodeUnfit, WorkerDied, one_line
from data_pipeline.foundation.formatting import human_size
from data_pipeline.foundation.progress import Activity

_RETRIES = 2  # of a unit whose worker was lost, before it gets the memory of a whole node
_AT_ONCE = 500  # units that are submitted before it is asked which have ended
_AHEAD = 64  # units that Ray holds beyond those at work, or a tenth of these; at most three for each worker
_SECONDS_BETWEEN_LOOKS = 1.0  # at the nodes, and at what the workers report
_SECONDS_TO_BEGIN = 600.0  # for a unit that needs a node's whole memory
_WORKER_BYTES = 300_000_000  # of a worker without a unit's own data: Python, NumPy, Arrow, a language identifier
_NODE_OF_OOM = re.compile(r"IP: ([^,\s]+)")
Given = TypeVar("Given")


class _Answer(NamedTuple):
    """The answer of a unit on a node, or why the node can't do any."""

    node: str
    answer: Any = None
    unfit: str = ""


@dataclass(frozen=True)
class _Task:
    """A unit that Ray has. `attempt`: how many workers it has lost; the last one is `alone` on its node."""

    ref: ray.ObjectRef
    needs: Needs
    avoided: frozenset[str]
    attempt: int

    @property
    def alone(self) -> bool:
        return self.attempt > _RETRIES


class Dispatch(Generic[Given]):
    """Applies `function` to each of `inputs` on the nodes of the cluster; `what` names the work in messages.

    A unit that fails where another node may succeed is tried on one. A unit whose worker was lost is tried again, twice
    at most, with twice the memory each time. The last try gets the memory of a whole node, which helps if only several
    units at once fill it.

    `at_work` is kept up to date with what the workers of units at work report to `board`, an actor.
    """

    def __init__(
        self,
        function: Callable[[Given], Any],
        inputs: Mapping[str, Given],
        what: str,
        needs: Callable[[Given], Needs],
        board: Any,
        at_work: dict[str, Activity],
    ):
        self._task = ray.remote(max_retries=0)(_attempting(function, board))
        self._inputs, self._what, self._needs = inputs, what, needs
        self._board, self._at_work = board, at_work
        self._fresh, self._again, self._last = iter(inputs), deque[str](), deque[str]()
        self._running: dict[str, _Task] = {}
        self._ended = queue.SimpleQueue[tuple[str, Any, Future[tuple[str, Any, str]]]]()
        self._lost = Counter[str]()
        self._nodes = Nodes(what)
        self._rooms: dict[str, Needs] = {}  # what each node has
        self._reports: Future[dict[str, tuple[str, Activity]]] | None = None
        self._looked, self._moved = 0.0, time.monotonic()

    def results(self) -> Iterator[tuple[str, Any]]:
        """(name, result) of each unit as it ends: what `function` returned, or a FailedError if its worker was lost on
        each try.

        Raises FailedError if no node is left or Ray gives up.
        """
        over = 0
        try:
            while True:
                for result in self._look():
                    over += 1
                    yield result
                more = self._submit()
                if not self._running:
                    break
                for result in self._take(wait=not more):
                    over += 1
                    yield result
            if over < len(self._inputs):
                raise FailedError("\n".join([f"{self._what}: no node is left", *self._nodes.why_left_out()]))
        except ray.exceptions.RayError as error:
            raise FailedError(f"{self._what}: Ray gave up: {one_line(error)}") from None
        finally:
            if self._running:  # ends the workers too; `ray.cancel` of many tasks that just end can crash the driver
                ray.shutdown()

    def _submit(self) -> bool:
        """Submits units, some at a time; returns whether there is room for more."""
        cpus = cpus_of(room for node, room in self._rooms.items() if node not in self._nodes.left_out)
        most = cpus + max(cpus // 10, min(3 * cpus, _AHEAD))
        for _ in range(min(_AT_ONCE, most - len(self._running))):
            if (name := self._next()) is None:
                return False
            self._start(name)
        return len(self._running) < most

    def _next(self) -> str | None:
        """The unit to submit now, if any."""
        if not self._nodes.some_fit:
            return None
        if self._again:
            return self._again.popleft()
        if self._nodes.some_left and (name := next(self._fresh, None)) is not None:
            return name
        return self._last.popleft() if self._last and all(task.alone for task in self._running.values()) else None

    def _start(self, name: str) -> None:
        attempt, avoided = self._lost[name], self._nodes.avoided_by(name)
        needs = self._capped(self._needs(self._inputs[name]), avoided, attempt)
        options = {"name": f"{self._what}/{name}", "num_cpus": needs.cpus, "memory": needs.memory}
        if avoided:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"}
        given = ray.cloudpickle.dumps(self._inputs[name])
        ref = self._task.options(**options).remote(name, given, attempt, self._nodes.others_may_try(name))
        self._running[name] = _Task(ref, needs, avoided, attempt)
        ref.future().add_done_callback(lambda future: self._ended.put((name, ref, future)))

    def _capped(self, needs: Needs, avoided: frozenset[str], attempt: int) -> Needs:
        """What a unit asks for, at most what one of the nodes has: Ray would wait for a larger one for ever."""
        needs = Needs(_rounded(needs.memory + _WORKER_BYTES << attempt), needs.cpus)
        rooms = [room for node, room in self._rooms.items() if node not in avoided]
        alone = attempt > _RETRIES
        if not rooms or (not alone and any(needs.fits(room) for room in rooms)):
            return needs
        largest = max(rooms, key=lambda room: (room.memory, room.cpus))
        memory = largest.memory if alone else min(needs.memory, largest.memory)
        return Needs(memory, min(needs.cpus, largest.cpus))

    def _take(self, wait: bool) -> Iterator[tuple[str, Any]]:
        """Yields the results of units that have ended; may wait a moment for the first."""
        with contextlib.suppress(queue.Empty):
            ended = [self._ended.get(wait, _SECONDS_BETWEEN_LOOKS)]
            while not self._ended.empty():
                ended.append(self._ended.get())
            for name, ref, future in ended:
                task = self._running.get(name)
                if task is None or task.ref != ref:  # cancelled, and submitted again
                    continue
                del self._running[name]
                self._at_work.pop(name, None)
                self._moved = time.monotonic()
                if (result := self._result(name, task, future)) is not None:
                    yield name, result

    def _result(self, name: str, task: _Task, future: "Future[tuple[str, Any, str]]") -> Any:
        """The result of a unit; None if it is to be tried again."""
        try:
            ended = _Answer(*future.result())
        except _losses() as error:
            return self._after_loss(name, task, error)
        if ended.unfit:
            self._nodes.add_unfit(ended.node, ended.unfit)
            self._again.append(name)
            return None
        failed = ended.answer
        if isinstance(failed, Failed) and failed.of_node:
            if isinstance(failed.error, NodeUnfit):
                self._nodes.add_unfit(ended.node, str(failed.error))
                again = True
            else:
                again = self._nodes.add_failure(ended.node, name, one_line(failed.error))
            if again:
                self._again.append(name)
                return None
        return failed

    def _after_loss(self, name: str, task: _Task, error: Exception) -> FailedError | None:
        of_memory = isinstance(error, ray.exceptions.OutOfMemoryError)
        self._lost[name] += 1
        at, activity = self._last_report(name, task)
        if of_memory and (found := _NODE_OF_OOM.search(str(error))):
            at = at or next((node for node, address in self._nodes.alive.items() if address == found[1]), "")
        if not task.alone:
            if at and not isinstance(error, ray.exceptions.NodeDiedError):
                why = "its memory ran out" if of_memory else "its worker died"
                self._nodes.add_failure(at, name, why)
            (self._last if self._lost[name] > _RETRIES else self._again).append(name)
            return None
        if of_memory:
            where = f" on {self._nodes.name(at)}" if at else ""
            return FailedError(f"out of memory{where} on every try, the last one with the node to itself")
        cause = "it crashed, or the system ended it because memory ran out"
        died = WorkerDied(f"the worker died on every try, the last one with a node to itself: {cause}")
        died.doing = activity
        return died

    def _last_report(self, name: str, task: _Task) -> tuple[str, str]:
        """The node of a unit whose worker was lost, and what it did; "" if it didn't say."""
        if not task.attempt:  # the first attempt confirms nothing
            return "", ""
        with contextlib.suppress(ray.exceptions.RayError):
            reports = ray.get(self._board.by_unit.remote(), timeout=SECONDS_TO_ANSWER)
            node, activity = reports.get(name, ("", Activity(name)))
            return (node, activity.doing) if activity.attempt == task.attempt else ("", "")
        return "", ""

    def _look(self) -> Iterator[tuple[str, FailedError]]:
        """Once a second: which nodes there are, and what the workers report. Yields units that can't begin."""
        if (now := time.monotonic()) - self._looked < _SECONDS_BETWEEN_LOOKS:
            return
        self._looked = now
        rooms = rooms_of_nodes()
        if rooms.keys() != self._rooms.keys():
            self._rooms = {node: room for node, (_, room) in rooms.items()}
            self._nodes.alive = {node: address for node, (address, _) in rooms.items()}
            self._submit_where_possible()
        if self._reports is None:
            self._reports = self._board.by_unit.remote().future()
        elif self._reports.done():
            with contextlib.suppress(ray.exceptions.RayError):
                for name, (_, activity) in self._reports.result().items():
                    if (task := self._running.get(name)) and task.attempt == activity.attempt:
                        self._at_work[name] = activity
            self._reports = None
        if now - self._moved > _SECONDS_TO_BEGIN and not self._at_work and self._running:
            self._moved = now
            minutes, memory = _SECONDS_TO_BEGIN / 60, max(task.needs.memory for task in self._running.values())
            what = f"no unit has begun for {minutes:.0f} minutes; Ray finds no node with {human_size(memory)} free"
            print(f"warning: {self._what}: {what}", file=sys.stderr, flush=True)
            for name, task in [*self._running.items()]:
                if task.alone:
                    del self._running[name]
                    ray.cancel(task.ref)
                    yield name, FailedError(f"the worker died on every try, and {what}")

    def _submit_where_possible(self) -> None:
        """Submits again what none of the present nodes can take."""
        for name, task in [*self._running.items()]:
            rooms = [room for node, room in self._rooms.items() if node not in task.avoided]
            if self._rooms and not any(task.needs.fits(room) for room in rooms):
                ray.cancel(task.ref)
                self._start(name)


def rooms_of_nodes() -> dict[str, tuple[str, Needs]]:
    """The address of each node that takes units, and what it has, by id."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], Needs(int(has.get("memory", 0)), int(has["CPU"])))
        for node in ray.nodes()
        if node["Alive"] and (has := node["Resources"]).get("CPU", 0) >= 1
    }


def cpus_of(rooms: Iterable[Needs]) -> int:
    """How many units nodes do at once."""
    return max(1, sum(room.cpus for room in rooms))


def _rounded(memory: int) -> int:
    """`memory` and at most an eighth more: Ray passes workers on only between units that ask for the same."""
    step = 1 << max(0, memory.bit_length() - 4)
    return -(-memory // step) * step


def _losses() -> tuple[type[Exception], ...]:
    """The errors of a unit whose worker or node was lost."""
    found = ray.exceptions
    return found.WorkerCrashedError, found.NodeDiedError, found.OutOfMemoryError, found.ObjectLostError


def _attempting(function: Callable[[Given], Any], board: Any) -> Callable[[str, bytes, int, bool], tuple]:
    """What does a unit in a worker. A node that lacks this package, or a module of the unit, can unpickle it and answer
    what it lacks: all that it needs is Ray."""
    pickled = ray.cloudpickle.dumps((attempt, function))

    def attempted(name: str, given: bytes, lost: int, others_may_try: bool) -> tuple[str, Any, str]:
        import ray  # the function is pickled by value, with nothing of this module

        node = ray.get_runtime_context().get_node_id()
        try:
            doing, work = ray.cloudpickle.loads(pickled)
            unit = ray.cloudpickle.loads(given)
        except Exception as error:
            return node, None, f"it can't run this code: {type(error).__name__}: {error}"
        return node, doing(work, unit, board, node, name, lost, others_may_try), ""

    return attempted
