"""Each callback with one rank unlike the other: both ranks continue, or both end with the same error."""

from pathlib import Path
from typing import Any

import fault_hunting

from tests.pretrain.training.test_unlike_ranks import HERE, trained
from tests.support.rank_processes import each, on_ranks
from tests.support.runs import run_file

# By callback: its arguments, what is unlike, the sections of the run file for it, and how both ranks end.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], int | str]] = {
    "Replay": ({"every_steps": 1}, "other arithmetic", {}, 0),
    "MemoryChecksums": (
        {"every_steps": 1},
        "a flipped bit",
        {},
        "step 3: memory of rank 1 changed between two updates: ",
    ),
    "Stragglers": ({}, "slow", {"run": {"max_steps": 5}}, 0),
    "WeightComparison": (
        {},
        "a flipped bit",
        {"checkpoint": {"every_steps": 2}},
        "step 2: rank 1 has other weights than the other ranks: ",
    ),
}


def test_each_callback_with_one_rank_unlike_the_other(small_corpus, tmp_path):
    assert CASES.keys() == set(fault_hunting.__all__)
    cases, expected = [], []
    for name, (arguments, what, sections, end) in CASES.items():
        callbacks = [{"name": f"fault_hunting:{name}", **arguments}, {"name": f"{HERE}:Unlike", "what": what}]
        changes = {"run": {"max_steps": 3}, "evaluation": [], "callbacks": callbacks, **sections}
        cases.append((run_file(tmp_path / name, Path(), **changes), small_corpus, what))
        expected.append(end)
    found = on_ranks(2, each, trained, cases)
    assert found[0] == found[1]
    for case, one, end in zip(cases, found[0], expected, strict=True):
        assert one == end or (isinstance(end, str) and end in str(one)), (case, one)
