"""What the work of a unit gets in a worker: the corpus's files, the progress display, and what units share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from data_pipeline.base.errors import may_be_of_node
from data_pipeline.base.progress import Activity
from data_pipeline.base.store import Store
from data_pipeline.base.stores import Checksum

Made = TypeVar("Made")


@dataclass(frozen=True)
class Attempt:
    """One attempt at a unit.

    Attributes:
        activity: what the worker does; the driver shows it.
        others_may_try: True: another node would try the unit after this one.
        confirm: gets the activity whenever another file is at work, if the unit may kill this process.
    """

    activity: Activity = field(default_factory=lambda: Activity(""))
    others_may_try: bool = False
    confirm: Callable[[Activity], None] | None = None

    def may_be_retried(self, error: Exception) -> bool:
        """True if `error` may be the node's fault and another node is free to try. The worker then raises it, instead
        of recording damage of the input."""
        return self.others_may_try and may_be_of_node(error)


@dataclass(frozen=True)
class Context:
    """The argument of a stage's `work`, beside the spec.

    Attributes:
        store: the files of the corpus.
        attempt: this attempt at the unit.
        shared: names the units that share what `cached` makes: those of one stage in one build.
    """

    store: Store
    attempt: Attempt = field(default_factory=Attempt)
    shared: str = ""

    def __post_init__(self) -> None:
        _shared.of((str(self.store), self.shared))  # frees what another stage has made

    @property
    def progress(self) -> Activity:
        """What the unit does. Set `doing` to a step in words: "training on 38 MB of text"."""
        return self.attempt.activity

    def file(self, name: str) -> None:
        """Says that the unit now works on an input file: `Stage.without` leaves this file out if it kills workers."""
        self.progress.file = self.progress.doing = name
        if self.attempt.confirm:
            self.attempt.confirm(self.progress)

    def checksum(self, path: str) -> Checksum:
        """The sha256 of the input file at `path`, and its progress; `Input` passes it on to what opens the file."""
        return Checksum(path, self.progress)

    def may_be_retried(self, error: Exception) -> bool:
        """As `Attempt.may_be_retried`."""
        return self.attempt.may_be_retried(error)

    def cached(self, key: str, make: Callable[[], Made]) -> Made:
        """The result of `make`, which the stage's units in this process share under `key`. Nobody may change it."""
        found = _shared.of((str(self.store), self.shared))
        if key not in found:
            found[key] = make()
        return cast(Made, found[key])


class _Shared:
    """What the units of one stage share in this process. The first unit of another stage begins with nothing."""

    def __init__(self) -> None:
        self._whose: tuple[str, str] = ("", "")
        self._made: dict[str, Any] = {}

    def of(self, whose: tuple[str, str]) -> dict[str, Any]:
        if whose != self._whose or not whose[1]:
            self._whose, self._made = whose, {}
        return self._made


_shared = _Shared()
