"""Pages in C4's layout, written to files and read back from the documents of a build."""

import gzip
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_pipeline.config import CorpusConfig
from data_pipeline.foundation.config_file import load
from data_pipeline.pipeline import build
from data_pipeline.tools.report import render
from tests.conftest import C4_SAMPLE, write_corpus_file

OFF = {"urls": None, "lines": False, "spans": False, "documents": False, "minhash": False}
Page = dict[str, str]


def page(text: str, url: str = "", timestamp: str = "2019-04-25T00:00:00Z") -> Page:
    return {"text": text, "url": url, "timestamp": timestamp}


def published(count: int) -> list[Page]:
    """The first pages of the shipped sample of C4."""
    with gzip.open(C4_SAMPLE, "rt", encoding="utf-8") as lines:
        return [page(one["text"], one["url"]) for one in map(json.loads, itertools.islice(lines, count))]


def write_pages(path: Path, pages: Iterable[Page]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as out:
        out.writelines(json.dumps(page) + "\n" for page in pages)


def dealt(pages: list[Page], files: int, seed: int) -> list[list[Page]]:
    """`pages` shuffled and split into `files` files."""
    shuffled = pages[:]
    random.Random(seed).shuffle(shuffled)
    return [shuffled[number::files] for number in range(files)]


def cleaned(folder: Path, files: list[list[Page]], **changes: object) -> Path:
    """The corpus of some files of pages, up to its documents. `changes`: sections of its corpus file."""
    for number, pages in enumerate(files):
        write_pages(folder / f"{number:03d}.json.gz", pages)
    return built(write_corpus_file(folder / "corpus.yaml", **{"dedup": OFF, **changes}), until="documents")


def built(file: Path, *changes: str, until: str = "shards") -> Path:
    """The corpus of a corpus file with these overrides, up to a stage, and its report."""
    return build(load(file, changes, CorpusConfig), until, render=render)


def plain(folder: Path, path: Path | str, kind: str, **changes: object) -> CorpusConfig:
    """A corpus below `folder` of one source, whose texts stay as they are."""
    source = {"format": kind, "path": str(path)}
    settings = {"name": "x", "output": str(folder / "corpus"), "sources": [source], "cleaning": {"profile": "none"}}
    return CorpusConfig.model_validate({**settings, **changes})


def trained(corpus: Path, **changes: object) -> dict[str, object]:
    """The section `tokenizer` of a build that takes the model of `corpus` rather than training one."""
    return {"path": str(corpus / "tokenizer/spiece.model"), "vocab_size": 500, "sentinels": 20, **changes}


def documents_of(corpus: Path) -> list[dict[str, Any]]:
    """The documents of a build, in order."""
    return [row for part in sorted((corpus / "documents").glob("*.parquet")) for row in pq.read_table(part).to_pylist()]


def texts_of(corpus: Path) -> dict[str, str]:
    """url → text of the documents of a build."""
    return {row["url"]: row["text"] for row in documents_of(corpus)}
