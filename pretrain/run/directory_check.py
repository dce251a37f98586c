"""Refuses a run directory that has other files than a run's: training would write among them, and `--fresh` would
rename them."""

from pathlib import Path

from data_pipeline.base.errors import UserError
from pretrain.run import metrics_file, restarts, status

# Files that the directory of each run has, and few other directories: one of them is the first that a start writes.
_FILES = (status.LOCK, status.STATUS, metrics_file.FILE_NAME, restarts.FILE_NAME)
_PATTERNS = (
    "logs/attempt-*",  # of `launch`
    "checkpoints/step-*",  # of a run that was copied
    "slurm/job.sbatch",  # of `launch slurm`
)
_NAMED = 3


def check_directory(run: Path) -> None:
    """Raises UserError if `run` is neither new, nor empty, nor the directory of a run."""
    try:
        found = sorted(path.name for path in run.iterdir() if path.name != status.STOP)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UserError(f"run.directory: {run} is no folder; name a new one") from None
    except OSError as error:
        raise UserError(f"run.directory: {run} can't be read: {error.strerror}") from None
    of_a_run = any((run / name).is_file() for name in _FILES) or any(next(run.glob(one), None) for one in _PATTERNS)
    if found and not of_a_run:
        names = ", ".join(found[:_NAMED]) + (", …" if len(found) > _NAMED else "")
        raise UserError(
            f"run.directory: {run} isn't empty and isn't a run: it has {names}; name a new folder, such as "
            f"{run / 'run-1'}"
        )
