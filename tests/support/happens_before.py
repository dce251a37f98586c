"""Whether accesses to memory from several streams are ordered: vector clocks over what a rank has recorded.

An access comes after another one if the other is earlier on the same stream, or by way of events that a stream or the
host has waited for. What the host launches comes after all that the host has waited for. Two accesses of the same bytes
without an order, one of them a write, are a race.

PyTorch's caching allocator gives freed memory to the next that asks for some on the stream that it was allocated on. It
waits for other streams only if it was told of them with `record_stream`. So new memory of a stream may be any that was
freed there before, and its first access must come after the last ones of that.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

HOST = -1


class Access(NamedTuple):
    """What an operation on `stream` reads or writes: the bytes from `low` to before `high` of `memory`."""

    stream: int
    memory: int
    low: int
    high: int
    writes: bool
    name: str


class Marked(NamedTuple):
    """An event is recorded on a stream."""

    event: int
    stream: int


class Wait(NamedTuple):
    """A stream, or the host, waits for events. `place`: who asks for it; "" for what always happens."""

    waiting: int
    events: tuple[int, ...]
    place: str


class Freed(NamedTuple):
    """Memory is freed that was allocated on the stream `pool`. `told`: the streams that the allocator was told of."""

    memory: int
    pool: int
    told: frozenset[int]


class First(NamedTuple):
    """The next access is the first one of `memory`, allocated on the stream `pool` when `freed` others were freed."""

    memory: int
    pool: int
    freed: int


class Turn(NamedTuple):
    """A stream comes to the `time` of its accesses, which must be after the times of others; with words for each."""

    stream: int
    time: int
    after: dict[int, tuple[int, str]]


Record = list[Access | Marked | Wait | Freed | First]
Program = list[Turn | Marked | Wait]


def program(record: Record) -> Program:
    """What must be ordered in a record, and what orders it."""
    times: dict[int, int] = defaultdict(int)
    accesses: dict[int, dict[Any, tuple[Access, int]]] = defaultdict(dict)  # of each memory, the last of each kind
    freed: list[tuple[int, list[tuple[Access, int]]]] = []  # with the stream that it was allocated on
    before: list[tuple[Access, int]] = []  # accesses of what has become new memory
    turns: dict[int, Turn] = {}  # by stream, since the last event or wait
    found: Program = []
    for entry in record:
        if isinstance(entry, Access):
            time = times[entry.stream] = times[entry.stream] + 1
            turn = turns.get(entry.stream, Turn(entry.stream, time, {}))
            for earlier, since in [*_conflicting(entry, accesses[entry.memory].values()), *before]:
                if since > turn.after.get(earlier.stream, (0, ""))[0]:
                    turn.after[earlier.stream] = since, f"{_words(earlier)}, then {_words(entry)}"
            turns[entry.stream] = turn._replace(time=time)
            accesses[entry.memory][entry[:-1]] = entry, time
            before = []
        elif isinstance(entry, Freed):
            last = accesses.pop(entry.memory, {}).values()
            freed.append((entry.pool, [one for one in last if one[0].stream not in {entry.pool, *entry.told}]))
        elif isinstance(entry, First):
            before = [one for pool, last in freed[: entry.freed] if pool == entry.pool for one in last]
        else:
            found += [*turns.values(), entry]
            turns = {}
    return [*found, *turns.values()]


def _conflicting(access: Access, others: Iterable[tuple[Access, int]]) -> Iterator[tuple[Access, int]]:
    for other, time in others:
        overlaps = other.low < access.high and access.low < other.high
        if other.stream != access.stream and overlaps and (other.writes or access.writes):
            yield other, time


def _words(access: Access) -> str:
    return f"{access.name} {'writes' if access.writes else 'reads'}"


def races(program: Program, without: int | None = None) -> Iterator[str]:
    """The races, if the entry with the number `without`, a wait, weren't there."""
    streams = 1 + max((entry.stream for entry in program if isinstance(entry, Turn | Marked)), default=0)
    clocks = [[0] * streams for _ in range(streams + 1)]  # of each stream, and of the host at last
    events: dict[int, list[int]] = {}
    for number, entry in enumerate(program):
        if isinstance(entry, Turn):
            clock = clocks[entry.stream]
            _join(clock, clocks[HOST])
            for stream, (time, words) in entry.after.items():
                if time > clock[stream]:
                    yield words
            clock[entry.stream] = entry.time
        elif isinstance(entry, Marked):
            events[entry.event] = [*clocks[entry.stream]]
        elif number != without:
            for event in entry.events:
                _join(clocks[entry.waiting], events[event])


def _join(clock: list[int], other: list[int]) -> None:
    for stream, time in enumerate(other):
        if time > clock[stream]:
            clock[stream] = time


def needed(program: Program, among: Iterable[int]) -> tuple[set[str], set[str]]:
    """The places of those of the waits `among` that there are, without one of which there is a race; and the others."""
    waits: dict[str, list[int]] = defaultdict(list)
    for number in among:
        if isinstance(entry := program[number], Wait) and entry.place:
            waits[entry.place].append(number)
    lacking = {place for place, numbers in waits.items() if any(any(races(program, number)) for number in numbers)}
    return lacking, set(waits) - lacking
