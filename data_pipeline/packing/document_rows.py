"""Which rows hold the tokens of one document."""

import numpy as np

from data_pipeline.packing.complete_documents import complete_documents
from data_pipeline.packing.concatenate import rows_of_tokens
from data_pipeline.packing.examples import rows_of_pairs
from data_pipeline.packing.rows import Documents, Rules


def rows_of_document(documents: Documents, rules: Rules, packing: str, number: int) -> range | None:
    """The rows that hold document `number` of a bucket; empty if its tokens are in no row.

    None for sentence_pairs, whose rows mix the sentences of several documents.
    """
    if packing == "concatenate":
        offsets, _ = rows_of_tokens(len(documents.tokens), rules)
        start, stop = documents.starts[number : number + 2].tolist()
        first, end = np.searchsorted(offsets, [start, stop], side="right").tolist()
        end -= int(offsets[end - 1] == stop)
        return range(first - 1, min(end, len(offsets) - 1)) if stop > start else range(0)
    if packing == "complete_documents":  # each document makes rows of its own
        return range(*(len(complete_documents(_first(documents, count), rules)) for count in (number, number + 1)))
    if packing == "examples":
        row = int(rows_of_pairs(documents, rules)[number])
        return range(row, row + 1)
    return None


def _first(documents: Documents, count: int) -> Documents:
    """The first `count` of `documents`."""
    targets = None if documents.targets is None else documents.targets[:count]
    return Documents(documents.tokens[: documents.starts[count]], documents.starts[: count + 1], targets)
