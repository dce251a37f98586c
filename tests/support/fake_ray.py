"""A cluster of Ray without processes, for tests of `Dispatch`."""

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from data_pipeline.base.progress import Activity


@dataclass(eq=False)
class Task:
    """A unit that was submitted. `others_may_try`: as the worker is told."""

    unit: str
    tries: int
    others_may_try: bool
    memory: int
    avoided: set[str]
    result: "Future[Any]" = field(default_factory=Future)
    node: str = ""

    def future(self) -> "Future[Any]":
        return self.result


class FakeRay:
    """The functions of Ray that `Dispatch` uses, its `board` and its `clock`.

    Each look at the `nodes` takes a second: the units at work end, and those that wait begin, each on the first node
    that has a CPU for it. `outcome(node, unit, tries)` says how a try ends: it returns the result, or raises what Ray
    raises if the worker is lost. `begun` has all tries, in order; `abandoned` the tasks that were given up.
    """

    def __init__(self, outcome: Callable[[str, str, int], Any], **cpus: int):
        self.outcome, self.cpus, self.memory = outcome, cpus, dict.fromkeys(cpus, 10**11)
        self.now = 0.0
        self.silent, self.mute = set[str](), set[str]()  # nodes whose first reports are lost, or all
        self.waiting, self.working, self.begun = list[Task](), list[Task](), list[Task]()
        self.abandoned = list[Task]()
        self.board = SimpleNamespace(by_unit=SimpleNamespace(remote=self._reports))

    def clock(self) -> float:
        return self.now

    def remote(self, max_retries: int, name: str) -> Callable[[Any], Any]:
        return lambda function: SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._submit(options)))

    def _submit(self, options: dict[str, Any]) -> Callable[..., Task]:
        def submit(asked: tuple[str, bytes, int, bool]) -> Task:
            unit, _, tries, others_may_try = asked
            avoided = re.findall(
                r"\w+", options.get("label_selector", {}).get("ray.io/node-id", "").removeprefix("!in")
            )
            self.waiting.append(Task(unit, tries, others_may_try, options["memory"], {*avoided}))
            return self.waiting[-1]

        return submit

    def nodes(self) -> list[dict[str, Any]]:
        self.now += 1
        ending, self.working = self.working, []
        for task in ending:
            try:
                task.result.set_result((task.node, self.outcome(task.node, task.unit, task.tries), ""))
            except Exception as error:
                task.result.set_exception(error)
        for task in [*self.waiting]:
            busy = [one.node for one in self.working]
            free = [node for node, number in self.cpus.items() if busy.count(node) < number]
            if able := [node for node in free if node not in task.avoided and task.memory <= self.memory[node]]:
                task.node = able[0]
                self.waiting.remove(task)
                self.working.append(task)
                self.begun.append(task)
        kinds = {node: {"CPU": number, "memory": self.memory[node]} for node, number in self.cpus.items()}
        return [{"NodeID": node, "NodeManagerAddress": node, "Alive": True, "Resources": kinds[node]} for node in kinds]

    def cancel(self, task: Task) -> None:
        for tasks in (self.waiting, self.working):
            if task in tasks:
                tasks.remove(task)

    def get(self, task: Task, timeout: float) -> Any:
        return task.result.result(timeout)

    def _reports(self) -> Task:
        heard = [task for task in self.begun if task.node not in self.mute]
        told = [task for task in heard if task.tries or task.node not in self.silent]
        answer = Task("", 0, False, 0, set())
        answer.result.set_result({task.unit: (task.node, Activity(task.unit, task.tries)) for task in told})
        return answer
