"""The results of units that write parts."""

from typing import Any

from data_pipeline.stages.parts import Histograms, PartsResult
from data_pipeline.text.document import EXAMPLES, Tally


def result(number: int) -> PartsResult:
    tally = Tally()
    for line in range(20):
        tally.line("policy", f"Line {line} of part {number}.")
    tally.document("short", f"Page {number}.")
    return PartsResult.of(tally, [], Histograms())


def examples(results: list[PartsResult]) -> dict[str, list[str]]:
    tally = Tally()
    for one in results:
        tally.add(one.counts)
    return tally.examples


def test_compacted_results_have_the_examples_of_all_and_hardly_any_others():
    whole = [result(number) for number in range(1000)]
    others = dict[str, Any]()
    kept = [one.compacted(others) for one in whole]
    assert examples(kept) == examples(whole)
    assert examples([one.compacted(others) for one in kept]) == examples(whole)  # a unit that is done again
    assert [one.counts.dropped_lines for one in kept] == [one.counts.dropped_lines for one in whole]
    # of n random numbers, about 3 ln(n) are among the three smallest so far
    assert sum(len(texts) for one in kept for texts in one.counts.examples.values()) < 2 * 12 * EXAMPLES
    assert sum(len(texts) for one in whole for texts in one.counts.examples.values()) == 1000 * (EXAMPLES + 1)
