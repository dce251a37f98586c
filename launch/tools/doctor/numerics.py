"""Whether DeepSpeed trains right with a run's settings: which ranks compare it with a plain loop, and what they say."""

import json

from launch.tools.doctor.all_reduce import RankGroup
from launch.tools.doctor.findings import REQUEST, Finding, Settings

SECONDS = 300.0  # DeepSpeed is imported, and for offloading it compiles
_RANKS = 2
_LONGEST_LINE = 200


def group(gpus: int, port: int) -> RankGroup:
    """Two ranks of one machine, or one where there is one GPU."""
    return RankGroup([min(_RANKS, gpus or _RANKS)], "127.0.0.1", port, SECONDS)


def environments(ranks: RankGroup, settings: Settings, on_gpus: bool) -> list[dict[str, str]]:
    """The environment of each rank, for `numerics_rank`."""
    given = {"seconds": ranks.seconds, "run_file": settings.run_file, "ranks": settings.all_ranks}
    return [{**environment, REQUEST: json.dumps(given)} for environment in ranks.environments(0, on_gpus)]


def finding(reports: list[str], errors: dict[str, str]) -> Finding:
    """What the doctor says: from rank 0's report, if there is one, or a line for each rank that failed."""
    expected = "the weights of a plain loop, to the bit, after each step"
    if not reports:
        error = next((line for line in errors.values()), f"no answer within {SECONDS:g} s")
        return Finding("numerics", "fault", f"the ranks failed: {error[:_LONGEST_LINE]}", expected)
    said = json.loads(reports[0])
    if not said["wrong"]:
        return Finding("numerics", "ok", f"{said['trained']}: {expected}")
    remedy = "don't train with these settings, and report this"
    if said["tested"]:
        remedy = f"install deepspeed {said['tested']} (constraints.txt)"
    return Finding("numerics", "fault", f"{said['trained']}: {said['wrong']}", expected, remedy)
