"""What the callbacks find, where it is, and how it ends the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from torch import Tensor

from data_pipeline.base.errors import FailedError
from data_pipeline.base.formatting import first_few
from pretrain.engine.checkpoint.directory import all_steps, checkpoint_directory, set_aside, set_latest
from pretrain.engine.ranks import on_rank_0
from pretrain.run import heartbeat
from pretrain.run.environment import Machine
from pretrain.training.trainer import Trainer

_MOST_NAMED = 3


def checked_interval(every_steps: int | Literal["auto"]) -> int | Literal["auto"]:
    """`every_steps` of a callback. Raises ValueError if it is neither "auto" nor a positive integer."""
    if every_steps == "auto" or (type(every_steps) is int and every_steps > 0):
        return every_steps
    raise ValueError(f"every_steps: expected an integer > 0 or auto, got {every_steps!r}")


def named(names: list[str], wrong: Tensor) -> str:
    """The names of the first tensors that are `wrong` (names,)."""
    return first_few((name for name, is_wrong in zip(names, wrong.tolist(), strict=True) if is_wrong), _MOST_NAMED)


def place(rank: int, machines: Sequence[Machine]) -> tuple[str, str]:
    """The host and the device of a rank: ("node-2", "GPU 1: NVIDIA H100 80GB HBM3")."""
    machine = next(one for one in machines if rank in one["ranks"])
    gpus, number = machine["gpus"], machine["ranks"].index(rank)
    if not gpus:
        return machine["host"], machine["cpu"]["model"] or "CPU"
    return machine["host"], f"GPU {number}: {gpus[number % len(gpus)]}"  # a rank may see only its own GPU


@dataclass(frozen=True)
class Finding:
    """A difference that was found.

    Attributes:
        what: the difference, in words.
        rank: the rank that it is on; None if it may be one of several.
    """

    what: str
    rank: int | None = None

    def end_run(self, trainer: Trainer, more: str, clean: int | None = None) -> NoReturn:
        """Tells the supervisor which rank is faulty, if that is known, and raises FailedError, whose message ends with
        `more`. All ranks call this together.

        `clean`: checkpoints after this step are set aside, since they may be wrong. None: all checkpoints are right.
        """
        if self.rank is not None:
            heartbeat.tell(trainer.run.world.rank, "faulty", str(self.rank))
        if clean is None:
            trainer.finish_saving()
        trainer.drop_unsaved()  # a checkpoint that is being written takes no other's place: it may be wrong
        run = trainer.run.directory
        aside = "" if clean is None else on_rank_0(lambda: _set_aside_after(run, clean), str)
        raise FailedError(f"step {trainer.step}: {self.what}; {more}{aside}")


def _set_aside_after(run: Path, step: int) -> str:
    """Sets the checkpoints of `run` after `step` aside, since they may be wrong. The oldest checkpoint stays in any
    case: without it the run would begin anew. Returns the end of an error message about this; "" if nothing was
    done."""
    steps = all_steps(run)
    kept = [one for one in steps if one <= step] or steps[:1]
    if len(kept) < len(steps):
        set_latest(run, kept[-1])
    aside = [set_aside(checkpoint_directory(run, one)).name for one in steps if one not in kept]
    said = f"; {', '.join(aside)}: set aside" if aside else ""
    if kept and kept[-1] > step:
        oldest = checkpoint_directory(run, kept[-1]).name
        said += f"; {oldest} may be wrong too, but it is the oldest: the run resumes from it; --fresh starts a new run"
    return said
