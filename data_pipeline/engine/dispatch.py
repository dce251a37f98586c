"""Submits units to a Ray cluster, takes their results, and retries units that failed or whose worker was lost."""

import contextlib
import queue
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import ray

from data_pipeline.base.errors import FailedError, NodeUnfit, WorkerDied, one_line
from data_pipeline.base.formatting import human_size
from data_pipeline.base.progress import Activity
from data_pipeline.engine.attempt import SECONDS_TO_ANSWER, Failed, Needs, attempt
from data_pipeline.engine.nodes import Nodes

_RETRIES = 2  # of a unit whose worker was lost, before the last try, which gets the memory of a whole node
_AT_ONCE = 500  # units that are submitted between two looks at the results
_AHEAD = 64  # units that wait in Ray, or a tenth of those that run; at most three for each worker
_SECONDS_BETWEEN_LOOKS = 1.0  # at the nodes and the workers' reports
_SECONDS_TO_BEGIN = 600.0  # for a unit that needs a node's whole memory
_WORKER_BYTES = 300_000_000  # of a worker without a unit's data: Python, NumPy, Arrow, a language identifier
_NODE_OF_OOM = re.compile(r"IP: ([^,\s]+)")
_LOSSES = (  # of a worker or its node
    *(ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError),
    *(ray.exceptions.OutOfMemoryError, ray.exceptions.ObjectLostError),
)
Given = TypeVar("Given")


@dataclass(frozen=True)
class _Task:
    """A unit that was submitted to Ray. `attempt`: how many of its workers were lost. `alone`: it gets a whole node."""

    ref: ray.ObjectRef
    needs: Needs
    avoided: frozenset[str]
    attempt: int

    @property
    def alone(self) -> bool:
        return self.attempt > _RETRIES


class Dispatch(Generic[Given]):
    """Applies `function` to each of `inputs` on the nodes of the cluster; `what` names the work in messages.

    A unit is retried on another node if it failed and the node may be at fault. A unit whose worker was lost is retried
    twice, each time with twice the memory. The last try gets the memory of a whole node, which helps if several units
    together had filled it.

    `board`: the actor to which workers report. `at_work` is kept up to date with the reports of running units.
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
        """(name, result) of each unit as it ends. The result is a FailedError if the worker was lost on every try.

        Raises FailedError if no node is left or Ray gives up.
        """
        left = {*self._inputs}
        try:
            more = True
            while more or self._running:
                for result in chain(self._look(), self._take(wait=not more)):
                    left.discard(result[0])
                    yield result
                more = self._submit()
            if left:
                raise FailedError("\n".join([f"{self._what}: no node is left", *self._nodes.why_left_out()]))
        except ray.exceptions.RayError as error:
            raise FailedError(f"{self._what}: Ray gave up: {one_line(error)}") from None
        finally:
            if self._running:  # ends the workers, too: `ray.cancel` of tasks that are just ending can crash the driver
                ray.shutdown()

    def _submit(self) -> bool:
        """Submits the next units; returns whether there is room for more."""
        cpus = cpus_of(room for node, room in self._rooms.items() if node not in self._nodes.left_out)
        most = cpus + max(cpus // 10, min(3 * cpus, _AHEAD))
        for _ in range(min(_AT_ONCE, most - len(self._running))):
            if (name := self._next()) is None:
                return False
            self._start(name)
        return len(self._running) < most

    def _next(self) -> str | None:
        """The next unit to submit, if any."""
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
        """The memory and CPUs that a unit asks Ray for: at most those of the largest node, since Ray would wait for a
        larger one for ever."""
        memory = needs.memory + _WORKER_BYTES << attempt
        step = 1 << max(0, memory.bit_length() - 4)  # Ray reuses a worker only for units that ask for the same
        needs = Needs(-(-memory // step) * step, needs.cpus)
        rooms = [room for node, room in self._rooms.items() if node not in avoided]
        alone = attempt > _RETRIES
        if not rooms or (not alone and any(needs.fits(room) for room in rooms)):
            return needs
        largest = max(rooms, key=lambda room: (room.memory, room.cpus))
        memory = largest.memory if alone else min(needs.memory, largest.memory)
        return Needs(memory, min(needs.cpus, largest.cpus))

    def _take(self, wait: bool) -> Iterator[tuple[str, Any]]:
        """Yields the results of units that have ended; `wait`: waits a moment for the first."""
        with contextlib.suppress(queue.Empty):
            ended = [self._ended.get(wait, _SECONDS_BETWEEN_LOOKS)]
            while not self._ended.empty():
                ended.append(self._ended.get())
            for name, ref, future in ended:
                task = self._running.get(name)
                if task is None or task.ref != ref:  # cancelled and submitted again
                    continue
                del self._running[name]
                self._at_work.pop(name, None)
                self._moved = time.monotonic()
                if (result := self._result(name, task, future)) is not None:
                    yield name, result

    def _result(self, name: str, task: _Task, future: "Future[tuple[str, Any, str]]") -> Any:
        """The result of a unit; None if the unit is retried."""
        try:
            node, answer, unfit = future.result()
        except _LOSSES as error:
            return self._after_loss(name, task, error)
        failed = answer.error if isinstance(answer, Failed) and answer.of_node else None
        if isinstance(failed, NodeUnfit):
            unfit = str(failed)
        if unfit:
            self._nodes.add_unfit(node, unfit)
        elif failed is None or not self._nodes.add_failure(node, name, one_line(failed)):
            return answer
        self._again.append(name)
        return None

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
        """The node and the last activity of a unit whose worker was lost; "" if it reported none."""
        if not task.attempt:  # reports of the first attempt may be late
            return "", ""
        with contextlib.suppress(ray.exceptions.RayError):
            reports = ray.get(self._board.by_unit.remote(), timeout=SECONDS_TO_ANSWER)
            node, activity = reports.get(name, ("", Activity(name)))
            return (node, activity.doing) if activity.attempt == task.attempt else ("", "")
        return "", ""

    def _look(self) -> Iterator[tuple[str, FailedError]]:
        """Once a second, looks at the nodes and the workers' reports. Yields failures of units that can't begin."""
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
        """Submits units again that none of the present nodes can take."""
        for name, task in [*self._running.items()]:
            rooms = [room for node, room in self._rooms.items() if node not in task.avoided]
            if self._rooms and not any(task.needs.fits(room) for room in rooms):
                ray.cancel(task.ref)
                self._start(name)


def rooms_of_nodes() -> dict[str, tuple[str, Needs]]:
    """(address, what it has) of each node that takes units, by id."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], Needs(int(has.get("memory", 0)), int(has["CPU"])))
        for node in ray.nodes()
        if node["Alive"] and (has := node["Resources"]).get("CPU", 0) >= 1
    }


def cpus_of(rooms: Iterable[Needs]) -> int:
    """How many units the nodes do at once."""
    return max(1, sum(room.cpus for room in rooms))


def _attempting(function: Callable[[Given], Any], board: Any) -> Callable[[str, bytes, int, bool], tuple]:
    """The function that does a unit in a worker, and returns the node, the result, and why the node is unfit. It needs
    nothing but Ray, so that a node without this package, or without a module of the unit, can answer what is missing.
    """
    pickled = ray.cloudpickle.dumps((attempt, function))

    def attempted(name: str, given: bytes, lost: int, others_may_try: bool) -> tuple[str, Any, str]:
        import ray  # the function is pickled by value, without this module's names

        node = ray.get_runtime_context().get_node_id()
        try:
            doing, work = ray.cloudpickle.loads(pickled)
            unit = ray.cloudpickle.loads(given)
        except Exception as error:
            return node, None, f"it can't run this code: {type(error).__name__}: {error}"
        return node, doing(work, unit, board, node, name, lost, others_may_try), ""

    return attempted
