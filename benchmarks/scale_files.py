"""How many calls of the file system does a build of many small inputs make? How long does each command take on many?

    python benchmarks/scale_files.py built 1000 --workers 1     # WET files of 5 kB, each a unit: calls and seconds
    python benchmarks/scale_files.py replanned 72000            # seconds and memory of commands on a finished corpus
    python benchmarks/scale_files.py driver 16000               # bytes that the driver holds for each input

`built` counts the calls of this process, in which units run one after the other with one worker; with more, on Ray,
it has the seconds alone. `replanned` makes a corpus whose documents are the links to one part, with a record for each
input like that of a WET file. Once a build has finished it, each command is run as a user runs it. In the last build
one input has changed, and the time is that until its unit begins.

`driver` makes such a corpus of 1,000 inputs and a larger one, whose documents no step compares. The peak of what Python
holds while a build finds all documents finished and writes the report is measured with tracemalloc. The difference of
both peaks, divided by that of the inputs, is what an input takes.

`--save` puts the rows into docs/results/scale/.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import scale_rows
from pydantic_core import to_json
from wet_files import write_wet

from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import CorpusConfig
from data_pipeline.engine.work_units import Finished, recorded
from data_pipeline.engine.workers import without_ray
from data_pipeline.stages import documents, report
from data_pipeline.stages.documents import DocumentsResult
from data_pipeline.stages.inputs import inputs_of
from data_pipeline.stages.pipeline import build

FEW = 1000  # inputs
NO_DEDUP = {"urls": None, "lines": False, "documents": False}
CALLS = ("fsync", "replace", "rename", "unlink", "remove", "mkdir")
WORDS = ["".join(random.Random(number).choices("etaoinshrdlu", k=2 + number % 8)) for number in range(200)]


def page(number: int, sentences: int) -> str:
    chance = random.Random(number)
    return "\n".join(f"{' '.join(chance.choices(WORDS, k=12)).capitalize()}." for _ in range(sentences))


def write_input(path: Path, number: int, pages: int, sentences: int) -> None:
    """A WET file of `pages`, from the page `number * pages` on."""
    own = range(number * pages, (number + 1) * pages)
    write_wet(path, ((f"http://example.org/{one}", page(one, sentences)) for one in own), level=1)


def settings_of(folder: Path, workers: int, **changes: Any) -> dict[str, Any]:
    """The corpus file of the inputs in `folder`."""
    settings = {
        "name": "many",
        "output": str(folder / "corpus"),
        "sources": [{"format": "wet", "path": str(folder / "inputs")}],
        "bytes_per_shared_unit": 0,
        "cleaning": {"profile": "none"},
        "tokenizer": {"vocab_size": 100, "byte_fallback": False, "sample_bytes": 1_000_000, "sentinels": 30},
        "ray": {"num_cpus": workers, "small_bytes": 10**15 if workers == 1 else 0},
    }
    return {**settings, **changes}


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
        write_input(folder / "inputs" / f"{number:06d}.wet.gz", number, 5, 12)
    config = CorpusConfig.model_validate(settings_of(folder, workers))
    for what in ("build", "again"):
        calls = counted() if workers == 1 else Counter[str]()
        began = time.monotonic()
        build(config)
        seconds = round(time.monotonic() - began, 1)
        found = [path for path in (folder / "corpus").rglob("*") if path.is_file()]
        largest = Counter(path.parent for path in found).most_common(1)[0][1]
        renames = calls["replace"] + calls["rename"]
        units = sum(stage.units for stage in report.read(folder / "corpus").stages)
        row: dict[str, object] = {"inputs": files, "workers": workers, "what": what, "seconds": seconds}
        row |= {"units": units, "files": len(found), "files in a folder": largest}
        if workers == 1:
            removed = calls["unlink"] + calls["remove"]
            row |= {"fsyncs": calls["fsync"], "renames": renames, "unlinks": removed, "mkdirs": calls["mkdir"]}
        yield row


def finished(files: int, workers: int, folder: Path, dedup: dict[str, Any]) -> Path:
    """The corpus file of a corpus of `files` finished inputs, of pages without duplicates of three sentences, which no
    step drops."""
    (folder / "inputs").mkdir(parents=True)
    settings = settings_of(folder, workers, dedup=dedup)
    write_input(folder / "inputs/000000.wet.gz", 0, 10, 2)
    with without_ray():  # of one input; the others have the same text, too little of it for a tokenizer's sample
        build(CorpusConfig.model_validate(settings | {"output": str(folder / "one")}), "tokenizer")
    settings["tokenizer"] = {"path": str(folder / "one/tokenizer/spiece.model"), "sentinels": 30}
    file = folder / "corpus.yaml"
    file.write_text(json.dumps(settings))
    _finish_documents(CorpusConfig.model_validate(settings), files, folder)
    return file


def driver(files: int, workers: int, folder: Path) -> Iterator[dict[str, object]]:
    """What the driver of a build holds for each input, in bytes."""
    peaks = {}
    for number in (FEW, files):
        file = finished(number, 1, folder / str(number), NO_DEDUP)
        config = CorpusConfig.model_validate(json.loads(file.read_text()))
        build(config, "documents")
        (Path(config.output) / ".stages/complete").unlink()  # so that the next build writes the report
        tracemalloc.start()
        build(config, "documents")
        _, peaks[number] = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    yield {"inputs": files, "bytes an input": round((peaks[files] - peaks[FEW]) / (files - FEW))}


def replanned(files: int, workers: int, folder: Path) -> Iterator[dict[str, object]]:
    """The seconds and the memory of commands on a corpus of `files` finished inputs."""
    file, corpus = finished(files, workers, folder, {**NO_DEDUP, "spans": True}), folder / "corpus"
    program = [sys.executable, "-m", "data_pipeline"]
    commands = {
        "build the rest": ["build", file],
        "build, nothing to do": ["build", file],
        "plan": ["plan", file, "--speeds", corpus, "--workers", "64"],
        "trace": ["trace", corpus, "wet/000000.wet.gz/000000003"],
        "verify": ["verify", corpus],
        "build, until the first unit": ["build", file],
    }
    for what, command in commands.items():
        until = " to do " if what == "build, until the first unit" else None
        if until:
            write_input(folder / f"inputs/{files - 1:06d}.wet.gz", 0, 11, 2)
        seconds, peak = measured([*program, *map(str, command)], until)
        yield {"inputs": files, "what": what, "seconds": seconds, "MB": peak}


def _finish_documents(config: CorpusConfig, files: int, folder: Path) -> None:
    """Makes the first stage's files and records: the first input's part, and a link to it for every other input."""
    (unit,) = recorded(documents.STAGE, DocumentsResult, LocalStore(folder / "one"))
    result, outputs = unit.result, unit.outputs
    (part,) = result.parts
    output = outputs[part.path]
    for number in range(1, files):
        (folder / f"inputs/{number:06d}.wet.gz").write_bytes(f"{number}".encode())
    # as much as of a WET file: 40 languages, three examples for each of ten rules, in each file others
    languages = {f"{chr(97 + number % 26)}{chr(97 + number // 26)}": number for number in range(40)}
    examples = {f"rule_{rule}": [page(rule * 3 + number, 4)[:190] for number in range(3)] for rule in range(10)}
    result = replace(result, languages=languages)
    corpus, lines, link = folder / "corpus", list[bytes](), folder / "one" / part.path
    for number, planned in enumerate(documents.plan(config, LocalStore(corpus), inputs_of(config).files)):
        path = f"{planned.spec.folder}/{planned.spec.part}.parquet"
        (corpus / path).parent.mkdir(parents=True, exist_ok=True)
        if number % 50_000 == 49_999:  # a file system has a limit of links
            link = Path(shutil.copy(link, folder / f"part-{number}.parquet"))
        os.link(link, corpus / path)
        name = planned.spec.inputs[0].file
        own = replace(part, path=path, first_id=planned.spec.identity(name, 0), characters=11_000_000)
        counts = replace(
            result.counts, examples={rule: [f"{number} {text}" for text in texts] for rule, texts in examples.items()}
        )
        one = replace(result, parts=[own], inputs=[replace(result.inputs[0], file=name)], counts=counts)
        fingerprint = documents.STAGE.fingerprint(planned)
        done = Finished(planned.name, fingerprint, one, {path: replace(output, sha256=f"{number:064x}")}, 20.0, 20.0)
        lines.append(to_json(done) + b"\n")
    LocalStore(corpus).append(".stages/documents/finished.jsonl", b"".join(lines), [])


def measured(command: list[str], until: str | None = None) -> tuple[float, int]:
    """(seconds, MB) that a command takes, or that it takes `until` it has printed this; then it is ended."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=-1, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout
        for line in process.stdout:
            if until and until in line:
                process.terminate()
                break
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode and not until:
        sys.exit(f"{command}: exit code {process.returncode}")
    return round(time.monotonic() - began, 1), round(used.ru_maxrss / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["built", "replanned", "driver"])
    parser.add_argument("inputs", type=int)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="keep the rows in docs/results/scale/")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {"built": built, "replanned": replanned, "driver": driver}[given.what](
            given.inputs, given.workers, Path(folder)
        )
        keys = ["code", "inputs", *(["workers"] if given.what == "built" else [])]
        keys += [] if given.what == "driver" else ["what"]
        code = scale_rows.code()
        scale_rows.measured(f"{given.what}.csv", ({"code": code, **row} for row in rows), keys, given.save)


if __name__ == "__main__":
    main()
