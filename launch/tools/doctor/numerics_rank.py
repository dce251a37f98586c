"""One rank of the comparison of DeepSpeed with a plain loop, as a program.

RANK and the like are in its environment, as for a rank of a run. Rank 0 reports the result.
"""

import json
import os
import signal
from pathlib import Path

from data_pipeline.foundation.config_file import load
from launch.rank_processes import PROGRAM_REPORT
from launch.tools.doctor.findings import REQUEST
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan


def main() -> None:
    given = json.loads(os.environ[REQUEST])
    signal.setitimer(signal.ITIMER_REAL, given["seconds"])  # ends this process wherever it waits
    path, *overrides = given["run_file"]
    config = load(Path(path), overrides, RunConfig)
    from pretrain.zero.ranks import process_group  # after the timer, since a slow file system makes it hang

    with process_group(1, given["seconds"], any_version=True) as (rank, _):
        from pretrain.zero import deepspeed_private, numerics  # DeepSpeed chooses its accelerator when it is imported

        found = numerics.compare(config, BatchPlan(config.batch, given["ranks"]).usual_accumulation)
        tested = deepspeed_private.TESTED_VERSION
        other = deepspeed_private.deepspeed.__version__ != tested
        if rank == 0:
            print(PROGRAM_REPORT, json.dumps({**found._asdict(), "tested": tested if other else None}), flush=True)


if __name__ == "__main__":
    main()
