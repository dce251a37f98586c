"""Packs the documents of a bucket into rows, in one of several ways."""

from collections.abc import Callable

from data_pipeline.corpus.packing.examples import examples
from data_pipeline.corpus.packing.rows import (
    Documents,
    Rows,
    Rules,
    complete_documents,
    concatenate,
    rows_of_tokens,
    sentence_pairs,
)

PACKINGS: dict[str, Callable[[Documents, Rules], Rows]] = {
    "concatenate": concatenate,
    "complete_documents": complete_documents,
    "sentence_pairs": sentence_pairs,
    "examples": examples,
}

__all__ = ["PACKINGS", "Documents", "Rows", "Rules", "rows_of_tokens"]
