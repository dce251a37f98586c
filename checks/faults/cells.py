"""The cells of the matrix: which fault happens where, and what must come of it by the documentation."""

import random
from dataclasses import dataclass

from checks.faults import happening
from checks.faults.planted import EARLY, OF_RANK_0, POINTS

STEPS, RANKS, SAVE_EVERY = 40, 2, 10
HANG_SECONDS, START_SECONDS, NO_WORD_SECONDS = 10.0, 40.0, 30.0
WHOLE_RUN = "the whole run"
HUNTING = [
    {"name": f"fault_hunting:{name}"} for name in ("Replay", "MemoryChecksums", "Stragglers", "WeightComparison")
]
FOUND_BY_HUNTING = "a bit of a weight"  # without these callbacks nothing finds it
MLFLOW = ("MLflow refused", "MLflow hanging", "MLflow answers 500")
_WORLD_CHANGES, _TWICE, _TWO_HOSTS, _ALONE = 0.5, 0.15, 5, 0.5

_WORK = [point for point in POINTS if point not in ("load", "log", "comparison of weights")]
_STEPS = ["first step", "step", "forward", "all-reduce", "copy of a save", "evaluation", "hook"]
_WRITES = ["write of a save", *OF_RANK_0]
_ANYWHERE = [*_WORK, "load"]
_ONE_HOST = {
    **dict.fromkeys((*happening.KILLS, *happening.HANGS, *happening.ERRORS), _ANYWHERE),
    **dict.fromkeys(("exit with 0", "exception in another thread", "a slow step", "the head killed"), _ANYWHERE),
    **dict.fromkeys(happening.CLOCKS, _ANYWHERE),
    **dict.fromkeys(happening.DISK, _WRITES),
    **dict.fromkeys(MLFLOW, (WHOLE_RUN,)),
    "EIO": [*_WRITES, "load"],
    "a loader's worker killed": _STEPS,
    "straggler": ["step"],
    FOUND_BY_HUNTING: ["comparison of weights"],
    "torn rename": list(OF_RANK_0),
}
_OF_A_HOST = ["first step", "step", "forward", "all-reduce", "copy of a save", "evaluation"]
_HOSTS = {
    **dict.fromkeys(("SIGKILL", "SIGSEGV", "SIGSTOP", "exception"), _ANYWHERE),
    **dict.fromkeys(("the agent killed", "the head killed"), _ANYWHERE),
    **dict.fromkeys(("a lost host", "a slow host", "a host cut off for a while", "a host cut off"), _OF_A_HOST),
}
_NAMED = {  # in the first line on the terminal; None: nothing fails
    **{signal: f"rank {{rank}} was killed by {signal}" for signal in happening.KILLS},
    **dict.fromkeys(happening.HANGS, "rank {rank} makes no progress"),
    **dict.fromkeys(happening.HARMLESS),
    **dict.fromkeys(MLFLOW, "MLflow"),
    "SIGSTOP": "rank {rank} makes no progress, and its process is stopped (SIGSTOP)",
    "SIGKILL two seconds later": "rank {rank} was killed by SIGKILL",
    "the head killed": None,  # the shell says so
    "exit with 0": "rank {rank} exited with code 0 before the run's end",
    "exception": "RuntimeError: on purpose",
    "out of memory": "MemoryError",
    "ENOSPC": "No space left on device",
    "EIO": "Input/output error",
    "EROFS": "Read-only file system",
    "a loader's worker killed": "data.workers: the loader's worker process",
    "straggler": None,  # ten steps are too few to tell
    FOUND_BY_HUNTING: "weights",
    "torn rename": "rank {rank} was killed by SIGKILL",
    "the agent killed": "{address} is lost",
    "a lost host": "{address} is lost",
    "a host cut off": "{address} is lost",
    "a slow host": None,
    "a host cut off for a while": None,
}
_ENDS_AT_ONCE = (*happening.KILLS, *happening.ERRORS, "exit with 0")
_GOES_ON_ALONE = ("the agent killed", "a lost host", "a host cut off")


@dataclass(frozen=True)
class Cell:
    """A fault of `rank`, or of its host, at `point` of `attempt`, in or after `step`.

    `attempt` 2: the second of two failures in a row. `ranks_after`: the ranks on which the run continues.
    """

    number: int
    fault: str
    point: str
    rank: int = 0
    step: int = 0
    attempt: int = 1
    hosts: int = 1
    ranks_after: int = RANKS

    @property
    def from_step(self) -> int:
        return 0 if self.point in EARLY else self.step

    @property
    def workers(self) -> int:
        return int(self.fault == "a loader's worker killed")

    @property
    def restarts(self) -> int:
        """0 where the command ends, and is started again on other ranks."""
        return 0 if self.ranks_after < RANKS and self.hosts == 1 else 5

    @property
    def codes(self) -> list[int]:
        """The exit codes of the command, which is started again until it is 0, as a user would."""
        last_save = self.step > STEPS - SAVE_EVERY and self.point in ("write of a save", "rename of a save")
        if self.fault == "the head killed":
            return [-9, 0]
        if not self.restarts or (self.fault in ("ENOSPC", "EROFS") and last_save):
            return [1, 0]
        return [0]

    def named(self, addresses: list[str]) -> str | None:
        """What the first line on the terminal must contain, where something fails."""
        words = _NAMED[self.fault]
        return words and words.format(rank=self.rank, address=addresses[self.rank] if addresses else "")

    @property
    def may_pass(self) -> bool:
        """Whether the fault may come too late to matter."""
        return self.point == "end"

    @property
    def hangs(self) -> bool:
        return self.fault in happening.HANGS or self.fault == "a host cut off"

    @property
    def seconds_to_detect(self) -> float:
        """The documented limit: deaths at once, hangs after the time that the run file gives."""
        if self.fault == "a host cut off":
            return NO_WORD_SECONDS + 1
        if self.hangs:
            return (START_SECONDS if self.point in EARLY else HANG_SECONDS) + 1
        return 1.0


ONCE_WRONG = {
    cell.number: cell
    for cell in (
        # a step that isn't in the log is in no checkpoint
        Cell(-2, "SIGKILL two seconds later", "log", rank=0, step=20),
        # all ranks wait for a write that hangs, in rounds that they take together: the one that writes is named
        Cell(-3, "hang", "write of a save", rank=1, step=15),
    )
}


def draw(seed: int, number: int) -> Cell:
    """The cell of this number: a fault, and a point at which it can happen. Every fifth cell has two hosts."""
    if number in ONCE_WRONG:
        return ONCE_WRONG[number]
    generator = random.Random(f"{seed}/{number}")
    hosts = 2 if number % _TWO_HOSTS == _TWO_HOSTS - 1 else 1
    table = _HOSTS if hosts == 2 else _ONE_HOST
    fault = generator.choice(sorted(table))
    point = generator.choice(table[fault])
    rank = 0 if point in OF_RANK_0 else generator.randrange(RANKS)
    step = generator.randrange(3, STEPS - 2)
    if fault == "torn rename":
        step = max(step, 2 * SAVE_EVERY - 1)  # a start is refused if the only checkpoint is damaged
    attempt, ranks_after = 2 if point == "load" else 1, RANKS
    if hosts == 2 and fault in _GOES_ON_ALONE and rank and generator.random() < _ALONE:
        ranks_after = 1
    elif hosts == 1 and attempt == 1 and fault in _ENDS_AT_ONCE and point in _STEPS and point != "hook":
        ranks_after = 1 if generator.random() < _WORLD_CHANGES else RANKS
    if ranks_after == RANKS and point in (*_STEPS, *EARLY) and generator.random() < _TWICE:
        attempt = 2
    return Cell(number, fault, point, rank, step, attempt, hosts, ranks_after)
