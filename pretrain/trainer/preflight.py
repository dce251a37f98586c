"""What is checked before the ranks of a run start: every problem is reported once, before each rank would."""

from pathlib import Path

from pretrain.checkpoint.choose import is_valid, newest
from pretrain.config import RunConfig
from pretrain.run import lock, status
from pretrain.trainer.validate import ValidatedRun, validate


def preflight(
    config: RunConfig, ranks: int, fresh: bool = False, may_train: bool = False, here: bool = True
) -> ValidatedRun:
    """Checks the whole run of `ranks`, which resumes from its newest checkpoint unless it is `fresh`.

    With `may_train`, a process may already train in the run directory. With `here`, the ranks will be on this machine,
    whose devices are checked. Raises UserError with every problem found, one line each.
    """
    directory = Path(config.run.directory)
    if not may_train:
        lock.check(directory)
    return validate(config, 0, ranks, None if fresh else newest(directory), ranks_are_here=here)


def is_finished(run: ValidatedRun) -> bool:
    """Whether nothing is left to do, which it says; else the ranks resume, if from an earlier checkpoint."""
    if run.finished and run.resume and is_valid(run.resume):
        print(run.nothing_left)
        return True
    return False


def move_aside(run: ValidatedRun) -> None:
    """Moves the run in the run directory aside, to make way for a fresh one."""
    if aside := status.move_aside(run.directory):
        print(f"{run.directory}: moved the existing run to {aside}", flush=True)
