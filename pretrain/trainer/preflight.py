"""Checks before the ranks of a run start: every problem is reported once, before each rank would."""

import sys
from pathlib import Path

from data_pipeline.corpus.manifest import FILE as MANIFEST
from data_pipeline.corpus.manifest import how_to_build
from data_pipeline.foundation.errors import UserError
from pretrain.checkpoint.directory import is_valid, newest
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.run import status
from pretrain.trainer.validate import ValidatedRun, validate


def unbuilt(config: RunConfig, folder: Path) -> list[str]:
    """A line for each local corpus of the run that isn't built, with the command that builds it.

    The corpus file is looked for in `folder`, that of the run file, and among those that ship.
    """
    training, held_out = config.data.train, config.data.validation
    named = [*(entry.corpus for entry in training), *(entry.corpus for entry in held_out)]
    missing = (name for name in dict.fromkeys(named) if "://" not in name and not (Path(name) / MANIFEST).exists())
    return [f"{name}/{MANIFEST}: no such file; {how_to_build(name, [folder])} makes it" for name in missing]


def preflight(
    config: RunConfig,
    ranks: int,
    fresh: bool = False,
    may_train: bool = False,
    here: bool = True,
    folder: Path = Path(),
) -> ValidatedRun:
    """Checks the whole run of `ranks`, which resumes from its newest checkpoint unless it is `fresh`.

    With `may_train`, a process may already train in the run directory. With `here`, the ranks will be on this machine,
    whose devices are checked. `folder` has the run file, and perhaps the files of its corpora. Raises UserError with
    every problem found, one line each.
    """
    directory = Path(config.run.directory)
    if not may_train:
        status.check_lock(directory)
    if (checkpoints := directory / "checkpoints").exists() and not checkpoints.is_dir():
        raise UserError(f"run.directory: {checkpoints} is no folder; move it away")
    if missing := unbuilt(config, folder):
        raise UserError("\n".join(missing))
    return validate(config, 0, ranks, None if fresh else newest(directory), ranks_are_here=here)


def unchecked(config: RunConfig, ranks: int, folder: Path) -> bool:
    """True if corpora are missing, so that `preflight` can't check the run yet; it says so on stderr.

    Raises UserError if `ranks` can't share the batches, which no corpus decides.
    """
    missing = unbuilt(config, folder)
    for line in missing:
        print(f"warning: {line}; until then, rows and vocabulary aren't checked", file=sys.stderr)
    if missing and (problems := BatchPlan(config.batch, ranks).problems()):
        raise UserError("\n".join(problems))
    return bool(missing)


def is_finished(run: ValidatedRun) -> bool:
    """True if nothing is left to do, which it says; else the ranks resume, if from an earlier checkpoint."""
    if run.finished and run.resume and is_valid(run.resume):
        print(run.nothing_left)
        return True
    return False
