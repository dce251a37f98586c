"""Finds the ids of the documents in the first rows of a finished corpus."""

import heapq

import pyarrow.parquet as pq

from data_pipeline.base.open_store import open_store
from data_pipeline.base.store import Store
from data_pipeline.corpus import Corpus
from data_pipeline.corpus.documents import all_documents, document_files
from data_pipeline.loading.reader import BlockStore
from data_pipeline.sources.formats import FORMATS
from data_pipeline.stages import tokens

_SEARCHED = 200_000  # documents


def ids_of_rows(corpus: Corpus, split: str, rows: int) -> list[str]:
    """The ids of the documents that begin in the first `rows` rows of a split, in their order; none if the split
    has no rows, or if they aren't known: rows aren't concatenated text, there are too many documents to look through,
    the copy has none, or a source's format isn't installed.

    The first block says how many documents begin there. The shuffle's hashes say which.
    """
    manifest, sources = corpus.manifest, corpus.manifest.config["sources"]
    settled = manifest.rows.packing == "concatenate" and manifest.rows.apply_at == "load"
    if not settled or not corpus.rows(split) or manifest.splits[split].documents > _SEARCHED:
        return []
    if any(source["format"] not in FORMATS for source in sources):
        return []
    block = BlockStore(corpus, split, cached=1).block(0)
    ends = block["row_offsets"]
    begun = int((block["document_offsets"] < ends[min(rows, len(ends) - 1)]).sum())
    together = {source["name"]: FORMATS[source["format"]].stays_together(source["options"]) for source in sources}

    def place(identity: str) -> int:
        return tokens.shuffle_hash(manifest.seed, identity, together[identity.partition("/")[0]])

    found = all_documents(open_store(corpus.location), "id", "split")
    return heapq.nsmallest(begun, (one.id for one in found if one.split == split), key=place)


def first_ids(store: Store, split: str, number: int) -> list[str]:
    """The ids of the first documents of a split, at most `number`; none if the corpus lacks its documents."""
    for name in document_files(store):
        table = pq.read_table(store.readable(name), columns=["id"], filters=[("split", "=", split)])
        if found := table["id"].slice(0, number).to_pylist():
            return found
    return []
