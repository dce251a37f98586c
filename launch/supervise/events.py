"""What a head learns of the ranks of a node, and what it asks of them."""

from typing import Literal, NamedTuple, Protocol


class Event(NamedTuple):
    """One report.

    - `rank failed`: rank `number` has met an error, and may take a while to end.
    - `rank ended`: rank `number` has ended with `code`, negative for a signal; `lines` are its last unless `code` is 0.
    - `signal`: stop signal `number` was sent to a process above the ranks.
    - `launcher ended`: the node's launcher has ended with `code`; `lines` are its last.
    - `all ended`: no process of the node's ranks is left.
    - `refused`: the node can't start its ranks; `lines` says why.
    """

    kind: Literal["rank failed", "rank ended", "signal", "launcher ended", "all ended", "refused"]
    number: int = 0
    code: int = 0
    lines: tuple[str, ...] = ()


class Part(Protocol):
    """The ranks of one node, `ranks` in number."""

    name: str
    ranks: int

    def events(self) -> list[Event]:
        """What has happened since the last call."""

    def lost(self) -> str | None:
        """Why nothing more will be heard of this node; None as long as it answers."""

    def quiet(self) -> bool:
        """Whether it hasn't answered for a while, so that it may be lost."""

    def end(self) -> None:
        """Kills every process of the ranks, or asks the node to."""

    def wait(self) -> None:
        """Waits until they are gone, as far as that can be known."""
