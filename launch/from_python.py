"""Runs that Python code starts on this machine."""

from pathlib import Path
from typing import Any

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.config_file import as_overrides, load_with, path_of
from data_pipeline.foundation.errors import FailedError
from launch import attempts
from pretrain.config import RunConfig
from pretrain.run_directory import Run


def local(
    config: str | Path,
    /,
    *,
    ranks: int | None = None,
    stop_at_step: int | None = None,
    fresh: bool = False,
    **overrides: Any,
) -> Run:
    """Starts or resumes a run on this machine, waits for its end, and returns it. Its ranks are processes of their own.

    `config`: a path, or `configs:NAME` for a file that ships. `ranks`: their number; None: one per GPU, or one.
    `stop_at_step` and `fresh` as in the command `launch local`. `overrides`: keys of the file; a section is a mapping,
    which is merged with the file's: `run={"max_steps": 100}`.

    The first Ctrl-C saves and stops the run, which is then returned. Raises UserError for a wrong config, FailedError
    if the run fails.
    """
    run = attempts.Run(path_of(config), as_overrides(overrides), stop_at_step, fresh)
    directory = Path(load_with(config, overrides, RunConfig).run.directory)
    code = attempts.launch_local(run, ranks)
    if code not in (0, STOPPED):
        raise FailedError(f"{directory}: the run has failed; {directory}/logs has what its ranks printed")
    return Run(directory)
