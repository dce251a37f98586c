"""Builds of small corpora: their pages, processes and files, and a fastText model written by hand."""

import contextlib
import gzip
import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

from data_pipeline.base.config_file import load
from data_pipeline.config import CorpusConfig
from data_pipeline.stages.pipeline import build
from data_pipeline.tools.trace import Trace, trace
from tests.conftest import C4_SAMPLE, TOP, write_corpus_file

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


def cleaned(folder: Path, files: list[list[Page]], **changes: object) -> Path:
    """The corpus of some files of pages, up to its documents. `changes`: sections of its corpus file."""
    for number, pages in enumerate(files):
        write_pages(folder / f"{number:03d}.json.gz", pages)
    return built(write_corpus_file(folder / "corpus.yaml", **{"dedup": OFF, **changes}), until="documents")


def built(file: Path, *changes: str, until: str = "shards") -> Path:
    """The corpus of a corpus file with these overrides, up to a stage, and its report."""
    return Path(build(load(file, changes, CorpusConfig), until))


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


def dropped_of(corpus: Path) -> list[dict[str, str]]:
    """The rows of all tables of dropped documents."""
    return [row for file in sorted((corpus / "dropped").rglob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def texts_of(corpus: Path) -> dict[str, str]:
    """url → text of the documents of a build."""
    return {row["url"]: row["text"] for row in documents_of(corpus)}


def traced(corpus: Path, name: str) -> Trace:
    """What became of the one document with this id or URL."""
    (found,) = trace(str(corpus), name)
    return found


# `data-pipeline` where even a few files are merged.
MERGING = """
from data_pipeline.cli import main
from data_pipeline.engine import merging

merging.group_size = lambda files, readers, opens: 2
main()
"""


def checksums(corpus: Path) -> dict[str, str]:
    """The sha256 of every file of a build except the report."""
    files = [path for path in corpus.rglob("*") if path.is_file() and ".stages" not in path.parts]
    return {
        str(path.relative_to(corpus)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.startswith("report.")
    }


def differences(corpus: Path, expected: dict[str, str]) -> list[str]:
    """The files of a build whose checksums aren't `expected`, and temporary files that are left."""
    found = checksums(corpus)
    names = sorted(name for name in expected | found if expected.get(name) != found.get(name))
    return [*(f"{name} differs" for name in names), *(f"{path} is left" for path in corpus.rglob("*.tmp"))]


def flip(path: Path, position: int = -1) -> None:
    """Flips one bit of one byte; a second call flips it back."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def with_fault(fault: str, stage: str, when: str, marker: Path) -> dict[str, str]:
    """The environment of a build with a fault in the first unit of a stage, as checks/faults/building.py plants it."""
    planted = [{"fault": fault, "stage": stage, "when": when, "marker": str(marker)}]
    search = os.pathsep.join([str(TOP / "checks/faults"), str(TOP), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": search, "BUILD_FAULTS": json.dumps(planted)}


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def raylets(tree: list[psutil.Process]) -> list[psutil.Process]:
    """The processes in `tree` that run Ray's program `raylet`."""
    return _those(tree, lambda process: process.name() == "raylet")


def at_work(tree: list[psutil.Process], corpus: Path) -> list[psutil.Process]:
    """The processes in `tree` that work on a unit of `corpus`: each has the file open whose lock makes builds wait."""
    held = str(corpus.resolve() / ".stages" / "workers")
    return _those(tree, lambda process: any(file.path == held for file in process.open_files()))


def _those(tree: list[psutil.Process], are: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in tree:
        with contextlib.suppress(psutil.Error):
            if are(process):
                found.append(process)
    return found


LABELS = ("__label__good", "__label__bad")
WORDS = ("</s>", "river", "casino")
VECTORS = np.array([[0, 0], [1, 0], [0, 1]], dtype="<f4")
OUTPUTS = np.array([[4, -4], [-4, 4]], dtype="<f4")


def write_model(path: Path, kind=3, outputs=OUTPUTS, buckets=0) -> Path:
    """A page with r times "river", c times "casino" and n words and an EOS token in all that the model knows is "good"
    with probability 1 / (1 + exp(-8 (r - c) / n)). Kind 3 is a classifier, 1 word vectors. `buckets` of n-grams take 8
    bytes each, and nothing looks at them."""
    entries = [(word, 0) for word in WORDS] + [(label, 1) for label in LABELS]
    softmax, magic, version = 3, 793_712_314, 12
    settings = [VECTORS.shape[1], 5, 5, 1, 5, 1, softmax, kind, buckets, 0, 0, 100]
    content = struct.pack("<2i12id", magic, version, *settings, 1e-4)
    content += struct.pack("<3i2q", len(entries), len(WORDS), len(LABELS), 100, -1)
    content += b"".join(name.encode() + b"\0" + struct.pack("<qb", 5, type_) for name, type_ in entries)
    vectors = np.concatenate([VECTORS, np.zeros((buckets, 2), "<f4")])
    for matrix in (vectors, outputs):
        content += struct.pack("<?2q", False, *matrix.shape) + matrix.tobytes()
    path.write_bytes(content)
    return path
