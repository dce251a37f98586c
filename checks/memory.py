"""Does each unit of a build stay within the memory that its stage asks for? Five minutes.

    python -m checks.memory [MEGABYTES]

Builds two corpora in which every line, or every run of words, occurs twice, and a classifier and evaluation sets apply.
Each unit works in a process of its own, whose peak is read. The sizes are MEGABYTES of text and twice as many, so that
what any worker holds, whatever its unit's size, cancels out: a unit's peak may grow by what its `memory` grows by.
"""

import argparse
import json
import multiprocessing
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import CorpusConfig
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Finished, Output, Result
from data_pipeline.stages import table
from data_pipeline.stages.inputs import files_of
from data_pipeline.stages.stage import Build
from tests.support.builds import OFF, write_model

_WORDS_OF_A_LINE, _LINES_OF_A_DOCUMENT = 8, 25  # 40 characters a line and 1,000 a document, the least that counts
NOISE = 30e6  # bytes that a peak varies by


@dataclass(frozen=True)
class Peak:
    """The bytes that the largest unit of a stage has asked for, and those by which its process has grown."""

    asked: int
    peak: int


def write_texts(folder: Path, characters: int) -> None:
    """Two files in which every line occurs twice, once in each, in documents of 25 lines in another order."""
    chance = random.Random(0)
    lines = [
        " ".join(f"{chance.randrange(16**4):04x}" for _ in range(_WORDS_OF_A_LINE))
        for _ in range(characters // 2 // (5 * _WORDS_OF_A_LINE))
    ]
    folder.mkdir(parents=True)
    for number in range(2):
        chance.shuffle(lines)
        with (folder / f"{number}.jsonl").open("w") as file:
            for start in range(0, len(lines), _LINES_OF_A_DOCUMENT):
                text = "\n".join(lines[start : start + _LINES_OF_A_DOCUMENT])
                file.write(json.dumps({"text": text}) + "\n")


def configs(folder: Path, characters: int) -> Iterator[CorpusConfig]:
    """A corpus deduplicated by lines, documents and MinHash, and one by substrings."""
    write_texts(folder / "texts", characters)
    model = write_model(folder / "model.bin", buckets=characters // 2)  # of 8 bytes each
    (folder / "items.txt").write_text((folder / "texts/0.jsonl").read_text()[: characters // 4].replace("\\n", "\n"))
    settings: dict[str, Any] = {
        "sources": [{"format": "jsonl", "name": "a", "path": str(folder / "texts")}],
        "bytes_per_shared_unit": 0,
        "tokenizer": {"vocab_size": 2000, "sample_bytes": characters},
        "rows": {"packing": "complete_documents"},
        "split": {"validation_fraction": 0},
    }
    classifier = {"path": str(model), "label": "good", "threshold": 0}
    sets = [{"name": "s", "path": str(folder / "items.txt"), "format": "text"}]
    dedup = {"urls": None, "lines": True, "documents": True, "minhash": True}
    steps = {
        "lines": {"cleaning": {"profile": "none", "classifier": classifier}, "dedup": dedup},
        "substrings": {
            "cleaning": {"profile": "none"},
            "dedup": {**OFF, "substrings": True},
        },
    }
    steps["lines"]["decontamination"] = {"sets": sets}
    for name, own in steps.items():
        output = str(folder / name)
        yield CorpusConfig.model_validate({**settings, **own, "name": name, "output": output})


def peaks(config: CorpusConfig) -> dict[str, Peak]:
    """The peak of each stage of a build."""
    store = LocalStore(Path(config.output))
    build = Build(config, store, files_of(config))
    found: dict[str, Peak] = {}
    for stage in table.stages_of(config):
        done = []
        for unit in stage.plan(build):
            with multiprocessing.get_context("spawn").Pool(1) as process:
                result, peak = process.apply(_measured, (stage.work, store, unit.spec))
            outputs = {name: Output(*store.written(name)) for name in (*unit.outputs, *result.files)}
            done.append(Finished(unit.name, "", result, outputs, 0.0, 0.0))
            if unit.memory >= getattr(found.get(stage.name), "asked", 0):
                found[stage.name] = Peak(unit.memory, peak)
        build.units[stage.name] = done
    return found


def _measured(work: Any, store: LocalStore, spec: Any) -> tuple[Result, int]:
    """The result of a unit, and the bytes by which this process has grown at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    result = work(Context(store, shared="check"), spec)
    return result, _memory("VmHWM") - before


def _memory(what: str) -> int:
    (kilobytes,) = re.findall(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def growths(folder: Path, characters: int) -> Iterator[tuple[str, str, int, int]]:
    """(corpus, stage, by how many bytes a unit asks for more, by how many its peak is higher) for each stage, if there
    is twice as much text as `characters`."""
    pairs = zip(*(configs(folder / str(size), size) for size in (characters, 2 * characters)), strict=True)
    for small, large in pairs:
        less, more = peaks(small), peaks(large)
        for stage in less.keys() & more.keys():
            yield small.name, stage, more[stage].asked - less[stage].asked, more[stage].peak - less[stage].peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("megabytes", nargs="?", type=int, default=20)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for corpus, stage, asked, grown in growths(Path(folder), parser.parse_args().megabytes * 1_000_000):
            found = f"{corpus:11}{stage:24}asks for {asked / 1e6:8.1f} MB more, takes {grown / 1e6:8.1f} MB more"
            print(found, "TOO MUCH" if grown > asked + NOISE else "", flush=True)
            wrong += grown > asked + NOISE
    return min(1, wrong)


if __name__ == "__main__":
    sys.exit(main())
