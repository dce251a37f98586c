"""Submits units to a Ray cluster, takes their results, and retries units that failed or whose worker was lost."""

import contextlib
import math
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

from data_pipeline.base.errors import FailedError, NodeUnfit, StoreError, WorkerDied, one_line
from data_pipeline.base.formatting import human_size
from data_pipeline.base.progress import Activity
from data_pipeline.engine.context import SECONDS_TO_ANSWER, Attempt, Failed, Needs, attempt
from data_pipeline.engine.nodes import Nodes

_RETRIES = 2  # of a unit, before its last try
_AT_ONCE = 500  # units that are submitted between two looks at the results
_AHEAD = 64  # units queued in Ray beyond those that run, at most three per CPU; with more CPUs, a tenth of the CPUs
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
    """A unit that was submitted to Ray. `tries`: how many tries failed before. `last`: this is the last try. `alone`:
    the unit gets the memory of a whole node."""

    ref: Any
    needs: Needs
    avoided: frozenset[str]
    tries: int
    last: bool
    alone: bool


class Dispatch(Generic[Given]):
    """Applies `function` to each of `inputs` on the nodes of the cluster; `what` names the work in messages.

    A unit is retried if it failed and the node may be at fault, or if its worker was lost: twice at once, on other
    nodes, and a last time when all other units are done and it is known which nodes work. A unit that a store refuses
    has one retry, its last. Each lost worker of a unit doubles its memory. If a worker was lost, the last try gets the
    memory of a whole node, which helps if several units together had filled the node.

    `board`: the actor to which workers report. `at_work` is kept up to date with the reports of running units.
    `abandon` gets the tasks that run when no more results are wanted, and ends them. `api`: the functions of Ray.
    """

    def __init__(
        self,
        function: Callable[[Given, Attempt], Any],
        inputs: Mapping[str, Given],
        what: str,
        needs: Callable[[Given], Needs],
        board: Any,
        at_work: dict[str, Activity],
        abandon: Callable[[list[Any]], None],
        api: Any = ray,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._api, self._clock, self._abandon = api, clock, abandon
        self._task = api.remote(max_retries=0, name=what)(_attempting(function, board))
        self._asking: dict[tuple[Needs, frozenset[str]], Any] = {}  # the task, by what it asks of nodes
        self._inputs, self._what, self._needs = inputs, what, needs
        self._board, self._at_work = board, at_work
        self._fresh, self._again, self._last = iter(inputs), deque[tuple[str, bool]](), deque[str]()
        self._running: dict[str, _Task] = {}
        self._ended = queue.SimpleQueue[tuple[str, Any, Future[tuple[str, Any, str]]]]()
        self._tries, self._lost = Counter[str](), Counter[str]()  # failed tries; those whose worker was lost
        self._nodes = Nodes(what, clock)
        self._rooms: dict[str, Needs] = {}  # what each node has
        self._reports: Future[dict[str, tuple[str, Activity]]] | None = None
        self._looked, self._moved = -math.inf, clock()

    def results(self) -> Iterator[tuple[str, Any]]:
        """(name, result) of each unit as it ends. The result is a FailedError if the worker was lost on every try.

        Raises FailedError if no node is left or Ray gives up.
        """
        left = {*self._inputs}
        try:
            more = True
            while left:
                for result in chain(self._look(), self._take(wait=not more)):
                    left.discard(result[0])
                    yield result
                more = self._submit()
                if left and not self._running and not self._nodes.some_left and not self._nodes.may_recover:
                    raise FailedError("\n".join([f"{self._what}: no node is left", *self._nodes.causes()]))
        except ray.exceptions.RayError as error:
            raise FailedError(f"{self._what}: Ray gave up: {one_line(error)}") from None
        finally:
            if self._running:
                self._abandon([task.ref for task in self._running.values()])

    def _submit(self) -> bool:
        """Submits the next units; returns whether there is room for more."""
        left_out = self._nodes.left_out
        cpus = cpus_of(room for node, room in self._rooms.items() if node not in left_out)
        most = cpus + max(cpus // 10, min(3 * cpus, _AHEAD))
        for _ in range(min(_AT_ONCE, most - len(self._running))):
            if (unit := self._next()) is None:
                return False
            self._start(*unit)
        return len(self._running) < most

    def _next(self) -> tuple[str, bool] | None:
        """The next unit to submit, if any, and whether this is its last try."""
        if not self._nodes.some_left:
            return None
        if self._again:
            return self._again.popleft()
        if (name := next(self._fresh, None)) is not None:
            return name, False
        if self._last and all(task.last for task in self._running.values()):
            return self._last.popleft(), True
        return None

    def _start(self, name: str, last: bool) -> None:
        tries, avoided = self._tries[name], self._nodes.avoided_by(name, last)
        alone = last and self._lost[name] > 0
        needs = self._capped(self._needs(self._inputs[name]), avoided, self._lost[name], alone)
        given = ray.cloudpickle.dumps(self._inputs[name])
        ref = self._asks(needs, avoided).remote((name, given, tries, not last and len(self._nodes.fit) > 1))
        self._running[name] = _Task(ref, needs, avoided, tries, last, alone)
        ref.future().add_done_callback(lambda future: self._ended.put((name, ref, future)))

    def _asks(self, needs: Needs, avoided: frozenset[str]) -> Any:
        """The task with what it asks of a node. Kept, since Ray checks options longer than a short unit takes."""
        if (needs, avoided) not in self._asking:
            options: dict[str, Any] = {"num_cpus": needs.cpus, "memory": needs.memory}
            if avoided:
                options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"}
            self._asking[needs, avoided] = self._task.options(**options)
        return self._asking[needs, avoided]

    def _capped(self, needs: Needs, avoided: frozenset[str], lost: int, alone: bool) -> Needs:
        """The memory and CPUs that a unit asks Ray for: at most those of the largest node, since Ray would wait for a
        larger one for ever."""
        memory = needs.memory + _WORKER_BYTES << lost
        step = 1 << max(0, memory.bit_length() - 4)  # Ray reuses a worker only for units that ask for the same
        needs = Needs(-(-memory // step) * step, needs.cpus)
        rooms = [room for node, room in self._rooms.items() if node not in avoided]
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
                self._moved = self._clock()
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
            self._again.append((name, task.last))
            return None
        if failed is None:
            self._nodes.add_finish(node, name)
            return answer
        of_store = isinstance(failed, StoreError)  # a store answers all nodes alike, and has been waited for
        if not self._nodes.add_failure(node, name, one_line(failed)) and not of_store:
            self._again.append((name, task.last))
            return None
        if task.last or len(self._nodes.fit) < 2:
            return answer
        self._retry(name, last_soon=of_store)
        return None

    def _retry(self, name: str, last_soon: bool = False) -> None:
        """Has a unit tried again. `last_soon`: the next try is the last one, and isn't put off."""
        self._tries[name] += 1
        if last_soon or self._tries[name] <= _RETRIES:
            self._again.append((name, last_soon))
        else:
            self._last.append(name)

    def _after_loss(self, name: str, task: _Task, error: Exception) -> FailedError | None:
        of_memory = isinstance(error, ray.exceptions.OutOfMemoryError)
        at, file = self._last_report(name, task)
        if of_memory and (found := _NODE_OF_OOM.search(str(error))):
            at = at or next((node for node, address in self._nodes.alive.items() if address == found[1]), "")
        self._lost[name] += 1
        if not task.alone:
            if at and not isinstance(error, ray.exceptions.NodeDiedError):
                why = "its memory ran out" if of_memory else "its worker died"
                self._nodes.add_failure(at, name, why)
            self._retry(name)
            return None
        if of_memory:
            where = f" on {self._nodes.name(at)}" if at else ""
            return FailedError(f"out of memory{where} on every try, the last one with the node to itself")
        cause = "it crashed, or the system ended it because memory ran out"
        died = WorkerDied(f"the worker died on every try, the last one with a node to itself: {cause}")
        died.file = file
        return died

    def _last_report(self, name: str, task: _Task) -> tuple[str, str]:
        """The node and the last input file of a unit whose worker was lost; "" if it reported none."""
        with contextlib.suppress(ray.exceptions.RayError):
            reports = self._api.get(self._board.by_unit.remote(), timeout=SECONDS_TO_ANSWER)
            node, activity = reports.get(name, ("", Activity(name)))
            return (node, activity.file) if activity.tries == task.tries else ("", "")
        return "", ""

    def _look(self) -> Iterator[tuple[str, FailedError]]:
        """Once a second, looks at the nodes and the workers' reports. Yields failures of units that can't begin."""
        if (now := self._clock()) - self._looked < _SECONDS_BETWEEN_LOOKS:
            return
        self._looked = now
        rooms = rooms_of_nodes(self._api)
        if rooms.keys() != self._rooms.keys():
            self._rooms = {node: room for node, (_, room) in rooms.items()}
            self._nodes.alive = {node: address for node, (address, _) in rooms.items()}
            self._submit_where_possible()
        if self._reports is None:
            self._reports = self._board.by_unit.remote().future()
        elif self._reports.done():
            with contextlib.suppress(ray.exceptions.RayError):
                for name, (_, activity) in self._reports.result().items():
                    if (task := self._running.get(name)) and task.tries == activity.tries:
                        self._at_work[name] = activity
            self._reports = None
        if now - self._moved > _SECONDS_TO_BEGIN and not self._at_work and self._running:
            self._moved = now
            minutes, memory = _SECONDS_TO_BEGIN / 60, max(task.needs.memory for task in self._running.values())
            what = f"no unit has begun for {minutes:.0f} minutes; Ray finds no node with {human_size(memory)} free"
            print(f"warning: {self._what}: {what}", file=sys.stderr, flush=True)
            for name, task in [*self._running.items()]:
                if task.last:
                    del self._running[name]
                    self._api.cancel(task.ref)
                    yield name, FailedError(f"the worker died on every try, and {what}")

    def _submit_where_possible(self) -> None:
        """Submits units again that none of the present nodes can take."""
        for name, task in [*self._running.items()]:
            rooms = [room for node, room in self._rooms.items() if node not in task.avoided]
            if self._rooms and not any(task.needs.fits(room) for room in rooms):
                self._api.cancel(task.ref)
                self._start(name, task.last)


def rooms_of_nodes(api: Any = ray) -> dict[str, tuple[str, Needs]]:
    """(address, what it has) of each node that takes units, by id. `api`: the functions of Ray."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], Needs(int(has.get("memory", 0)), int(has["CPU"])))
        for node in api.nodes()
        if node["Alive"] and (has := node["Resources"]).get("CPU", 0) >= 1
    }


def cpus_of(rooms: Iterable[Needs]) -> int:
    """How many units the nodes do at once."""
    return max(1, sum(room.cpus for room in rooms))


def _attempting(
    function: Callable[[Given, Attempt], Any], board: Any
) -> Callable[[tuple[str, bytes, int, bool]], tuple[str, Any, str]]:
    """The function that does a unit in a worker, and returns the node, the result, and why the node is unfit. It needs
    nothing but Ray, so that a node without this package, or without a module of the unit, can answer what is missing.

    After a failed try, the worker first reports its node, and waits until the report has arrived, since code that is
    imported may end the worker. A first try makes no report at once: this would take a third of a short unit's time.
    """
    pickled = ray.cloudpickle.dumps((attempt, function))
    seconds = SECONDS_TO_ANSWER

    def attempted(asked: tuple[str, bytes, int, bool]) -> tuple[str, Any, str]:
        import contextlib  # the function is pickled by value, without the names of this module
        import os

        import ray  # likewise

        name, given, tries, others_may_try = asked
        node = ray.get_runtime_context().get_node_id()
        if tries:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(board.begin.remote(node, os.getpid(), name, tries), timeout=seconds)
        try:
            doing, work = ray.cloudpickle.loads(pickled)
            unit = ray.cloudpickle.loads(given)
        except Exception as error:
            return node, None, f"it can't run this code: {type(error).__name__}: {error}"
        return node, doing(work, unit, board, node, name, tries, others_may_try), ""

    return attempted
