"""With this folder on PYTHONPATH, every rank records the rows that each of its steps takes.

Python imports a module of this name before anything else. RECORDED_ROWS names the folder for the records: a file for
each process, a line for each step, {"step", "rank", "rows": a digest of each row of the rank's micro-batches}.
"""

import os


def _record(engine) -> None:
    from tests.support.recorded import record_steps  # takes the engine's module

    record_steps(engine.Engine)


if "RANK" in os.environ and "RECORDED_ROWS" in os.environ:
    from tests.support.planting import Planting

    Planting(["pretrain.engine.engine"], _record).start()
