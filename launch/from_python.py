"""Starts a run on this machine from Python, as `launch local` does."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.base import arguments
from data_pipeline.base.command import STOPPED
from data_pipeline.base.config_file import Given, as_overrides, load_with, merged, path_of
from data_pipeline.base.errors import FailedError
from launch import attempts
from launch.protocol import MOST_RANKS
from pretrain.config import RunConfig
from pretrain.run_directory import Run, stop_step


def local(
    config: Given,
    /,
    *,
    ranks: int | None = None,
    stop_at_step: int | None = None,
    fresh: bool = False,
    **overrides: Any,
) -> Run:
    """Starts or resumes a run on this machine, waits for its end, and returns it. Its ranks are processes of their own.

    `config`: a path, `configs:NAME` for a file that ships, or a file's keys and values. `ranks`: their number; None:
    one per GPU, or one. `stop_at_step` and `fresh` as in the command `launch local`. `overrides`: keys of the file; a
    section is a mapping, which is merged with the file's: `run={"max_steps": 100}`. Callbacks are entries as in the
    file, since objects can't reach the ranks.

    The first Ctrl-C saves and stops the run, which is then returned. Raises UserError for a wrong argument or config,
    FailedError if the run fails.
    """
    stop = stop_step(stop_at_step)
    if ranks is not None:
        ranks = arguments.integer("ranks", ranks, 1, MOST_RANKS)
    directory, path = Path(load_with(config, overrides, RunConfig).run.directory), path_of(config)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(path, Mapping):  # the ranks read a file
            content, path = merged(path, (), RunConfig), Path(folder, "run.yaml")
            path.write_text(content, encoding="utf-8")
        code = attempts.launch_local(attempts.Run(path, as_overrides(overrides), stop, fresh), ranks)
    if code not in (0, STOPPED):
        raise FailedError(f"{directory}: the run has failed; {directory}/logs has what its ranks printed")
    return Run(directory)
