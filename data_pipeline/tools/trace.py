"""`data-pipeline trace`: looks a document up in the tables of a corpus, by id or URL."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.base.errors import FailedError, UserError, one_line
from data_pipeline.base.open_store import open_store
from data_pipeline.base.store import Store
from data_pipeline.stages.dropped import COLUMNS
from data_pipeline.stages.kinds import DOCUMENTS, DROPPED
from data_pipeline.text.document import normalize_url

_KEPT = ("id", "url", "language", "split", "text")
_CHARACTERS = 200


@dataclass(frozen=True)
class Trace:
    """What became of a document.

    Attributes:
        step, rule: what dropped the document; "": the corpus has the document.
        kept: the id of the document that stays in its place; "": none is known.
        found: what the rule has found in the document.
        language, split: of a document that the corpus has.
        text: the first 200 characters, before the step or as they are kept.
    """

    id: str
    url: str
    step: str = ""
    rule: str = ""
    kept: str = ""
    found: str = ""
    language: str = ""
    split: str = ""
    text: str = ""


def trace(location: str, name: str) -> list[Trace]:
    """The documents with the id or URL `name` in the corpus at `location`, dropped ones first.

    URLs are compared as deduplication does. Raises UserError if there are none, and FailedError for a damaged file.
    """
    store = open_store(location)
    try:
        dropped = list(_rows(store, DROPPED.folder, COLUMNS, name))
        kept = list(_rows(store, DOCUMENTS.folder, _KEPT, name))
    except pa.ArrowException as error:
        way_out = "data-pipeline build CORPUS.yaml --repair writes damaged files again"
        raise FailedError(f"{store}: {one_line(error)}; {way_out}") from None
    if not store.names(DOCUMENTS.folder) and not store.names(DROPPED.folder):
        raise UserError(f"{store}: no corpus with documents; name the directory that `data-pipeline build` has written")
    if not dropped and not kept:
        reason = "" if store.names(DROPPED.folder) else f"; it has no {DROPPED.folder}/ (keep_dropped: true writes it)"
        raise UserError(f"{name}: {store} has no such document, neither kept nor dropped{reason}")
    return [Trace(**{**row, "text": row["text"][:_CHARACTERS]}) for row in (*dropped, *kept)]


def _rows(store: Store, folder: str, columns: tuple[str, ...], name: str) -> Iterator[dict[str, str]]:
    """The rows of a folder's tables with this id or URL."""
    for file in sorted(one for one in store.names(folder) if one.endswith(".parquet")):
        if "://" not in name:
            yield from pq.read_table(
                store.readable(file), columns=list(columns), filters=[("id", "=", name)]
            ).to_pylist()
            continue
        with pq.ParquetFile(store.readable(file)) as opened:
            for group in range(opened.num_row_groups):
                urls = opened.read_row_group(group, ["url"])["url"].to_pylist()
                if found := [number for number, url in enumerate(urls) if normalize_url(url) == normalize_url(name)]:
                    yield from opened.read_row_group(group, list(columns)).take(found).to_pylist()


def as_text(found: Trace) -> str:
    """A trace in lines."""
    what = f"dropped by {found.step}: {found.rule}" if found.step else f"kept, split {found.split}"
    entries = [("url", found.url), ("", what), ("language", found.language), ("stays", found.kept)]
    entries += [("found", found.found), ("text", " ".join(found.text.split()))]
    return "\n".join([found.id, *(f"  {name:9} {text}" for name, text in entries if text)])
