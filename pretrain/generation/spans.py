"""Generated spans."""

from collections.abc import Iterable
from itertools import takewhile

from data_pipeline.text.vocabulary import Vocabulary


def split_spans(target_ids: Iterable[int], vocabulary: Vocabulary) -> dict[int, list[int]]:
    """The span after each sentinel of a target sequence, up to eos.

        targets:  <x> for inviting <y> last </s>    →    {<x>: for inviting, <y>: last}

    A model's output may be malformed: tokens before the first sentinel are dropped, and so are the later spans of a
    repeated sentinel.
    """
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in takewhile(lambda token: token != vocabulary.eos, target_ids):
        if token in vocabulary.sentinel_ids:
            span = []
            spans.setdefault(token, span)
        elif token != vocabulary.pad:
            span.append(token)
    return spans
