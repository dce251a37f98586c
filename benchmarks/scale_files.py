"""How many calls of the file system does a build of many small inputs make? How long does a finished build take again?

    python benchmarks/scale_files.py built 1000 --workers 1     # WET files of 5 kB, each a unit: calls and seconds
    python benchmarks/scale_files.py replanned 72000            # seconds of each command on a finished corpus

`built` counts the calls of this process, in which units run one after the other with one worker; with more, on Ray,
it has the seconds alone. `replanned` makes a corpus whose documents are the links to one part, with a record for each
input like that of a WET file, and times the build that finishes it, the next one, `plan` and `trace`.
"""

import argparse
import gzip
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from data_pipeline.config import CorpusConfig
from data_pipeline.execution.work_units import Finished, Output
from data_pipeline.pipeline import build
from data_pipeline.stages import documents
from data_pipeline.stages.parts import WrittenPart
from data_pipeline.tools import finished_build, planning, trace

CALLS = ("fsync", "replace", "rename", "unlink", "remove", "mkdir")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "wait"]


def page(number: int, sentences: int) -> str:
    chance = random.Random(number)
    return "\n".join(f"{' '.join(chance.choices(WORDS, k=12)).capitalize()}." for _ in range(sentences))


def write_wet(path: Path, number: int, pages: int, sentences: int) -> None:
    """A gzipped WET file of `pages`."""
    with path.open("wb") as file:
        for own in range(number * pages, (number + 1) * pages):
            text = page(own, sentences).encode()
            header = f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://example.org/{own}\r\n"
            header += f"WARC-Date: 2024-01-01T00:00:00Z\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
            file.write(gzip.compress(header.encode() + b"\r\n" + text + b"\r\n\r\n", 1))


def config_of(folder: Path, workers: int, **changes: Any) -> CorpusConfig:
    settings = {
        "name": "many",
        "output": str(folder / "corpus"),
        "sources": [{"format": "wet", "path": str(folder / "inputs")}],
        "bytes_per_shared_unit": 0,
        "cleaning": {"profile": "none"},
        "tokenizer": {"vocab_size": 40, "byte_fallback": False, "sample_bytes": 1_000_000, "sentinels": 30},
        "ray": {"num_cpus": workers, "small_bytes": 10**15 if workers == 1 else 0},
    }
    return CorpusConfig.model_validate({**settings, **changes})


def counted() -> Counter[str]:
    """What counts the calls of this process from now on."""
    calls: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return call(*arguments, **options)

        return counts

    for name in CALLS:
        setattr(os, name, counting(name, getattr(os, name)))
    return calls


def built(files: int, workers: int, folder: Path) -> Iterator[dict[str, object]]:
    """A build of `files` WET files of 5 kB, and the next one, which finds everything up to date."""
    (folder / "inputs").mkdir()
    for number in range(files):
        write_wet(folder / "inputs" / f"{number:06d}.wet.gz", number, 5, 12)
    config = config_of(folder, workers)
    for what in ("build", "again"):
        calls = counted() if workers == 1 else Counter[str]()
        seconds = timed(lambda: build(config))
        found = [path for path in (folder / "corpus").rglob("*") if path.is_file()]
        largest = Counter(path.parent for path in found).most_common(1)[0][1]
        renames = calls["replace"] + calls["rename"]
        row: dict[str, object] = {
            "what": what,
            "inputs": files,
            "workers": workers,
            "seconds": seconds,
            "files": len(found),
        }
        row |= {"files in a folder": largest, "fsyncs": calls["fsync"], "renames": renames}
        yield row | {"unlinks": calls["unlink"] + calls["remove"], "mkdirs": calls["mkdir"]}


def replanned(files: int, workers: int, folder: Path) -> Iterator[dict[str, object]]:
    """A corpus of `files` finished inputs, of pages without duplicates of three sentences, which no step drops."""
    (folder / "inputs").mkdir()
    off = {"urls": None, "lines": False, "documents": False}
    config = config_of(folder, workers, dedup={**off, "spans": True})
    write_wet(folder / "inputs/000000.wet.gz", 0, 50, 2)
    with_one = config.model_copy(update={"output": str(folder / "one")})
    (unit,) = documents.plan(with_one, folder / "one")
    result = documents.write_documents(folder / "one", unit.spec)
    (part,) = result.parts
    size = (folder / "one" / part.path).stat().st_size
    for number in range(1, files):
        (folder / f"inputs/{number:06d}.wet.gz").write_bytes(f"{number}".encode())
    # as much as of a WET file: 100 domains, 40 languages, three examples for each of ten rules
    result = replace(
        result,
        domains={f"a-site-with-a-name-{number}.example.org": 1000 - number for number in range(100)},
        languages={f"{chr(97 + number % 26)}{chr(97 + number // 26)}": number for number in range(40)},
        examples={f"rule_{rule}": [page(rule * 3 + number, 4)[:200] for number in range(3)] for rule in range(10)},
    )
    corpus = folder / "corpus"
    lines, link = [], folder / "one" / part.path
    for number, planned in enumerate(documents.plan(config, corpus)):
        path = f"{planned.spec.folder}/{planned.spec.part}.parquet"
        (corpus / path).parent.mkdir(parents=True, exist_ok=True)
        if number % 50_000 == 49_999:  # a file system has a limit of links
            link = Path(shutil.copy(link, folder / f"part-{number}.parquet"))
        os.link(link, corpus / path)
        name = planned.spec.inputs[0].file
        own = WrittenPart(path, "wet", planned.spec.identity(name, 0), 11_000_000, part.documents)
        if hasattr(part, "characters"):
            own = replace(own, characters=11_000_000)
        one = replace(result, parts=[own], inputs=[replace(result.inputs[0], file=name)])
        fingerprint = documents.STAGE.fingerprint(planned)
        done = Finished(planned.name, fingerprint, one, {path: Output(size, f"{number:064x}")}, 20.0, 20.0)
        lines.append(to_json(done) + b"\n")
    (corpus / ".stages/documents/finished.jsonl").write_bytes(b"".join(lines))
    record = len(lines[0])
    for what in ("build the rest", "again"):
        seconds = timed(lambda: build(config))
        yield {"what": what, "inputs": files, "seconds": seconds, "bytes of a record": record}
    seconds = timed(lambda: planning.forecast_build(config, planning.report.read(corpus), "", 64))
    yield {"what": "plan --speeds", "inputs": files, "seconds": seconds}
    name = "wet/000000.wet.gz/000000003"
    seconds = timed(lambda: trace.trace(finished_build.open_build(corpus), name))
    yield {"what": "trace", "inputs": files, "seconds": seconds}


def timed(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return round(time.monotonic() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["built", "replanned"])
    parser.add_argument("inputs", type=int)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows = {"built": built, "replanned": replanned}[given.what](given.inputs, given.workers, Path(folder))
        for row in rows:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
