"""Does each unit of a build stay within the memory that its stage declares? Five minutes.

    python -m checks.memory [MEGABYTES]

Builds two corpora in which every line, or every run of words, occurs twice, and a classifier and evaluation sets apply.
Every stage has units, those that merge files too. Each unit works in a process of its own, whose peak is read. A line
for each stage says what its largest unit declares and takes, beside what the process had before. The sizes are
MEGABYTES of text and twice as many, so that what any worker holds, whatever its unit's size, cancels out: a unit that
takes more than it declares may only take as much more of twice the text as it declares more.
"""

import argparse
import json
import multiprocessing
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import CorpusConfig
from data_pipeline.engine import merging
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Finished, Output, Result
from data_pipeline.stages import table
from data_pipeline.stages.inputs import inputs_of
from data_pipeline.stages.stage import Build
from tests.support.builds import OFF, write_model

_WORDS_OF_A_LINE, _LINES_OF_A_DOCUMENT = 8, 25  # 40 characters a line and 1,000 a document, the least that counts
NOISE = 30e6  # bytes that a peak varies by


class Peak(NamedTuple):
    """The bytes that the largest unit of a stage declares, and those by which its process has grown."""

    declared: int
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
    steps: dict[str, dict[str, Any]] = {
        "lines": {"cleaning": {"profile": "none", "classifier": classifier}, "dedup": dedup},
        "substrings": {
            "cleaning": {"profile": "none"},
            "dedup": {**OFF, "substrings": True},
            "tokenizer": {"vocab_size": 2000, "sample_bytes": characters // 20},  # few enough for tokenizer-sample
        },
    }
    steps["lines"]["decontamination"] = {"sets": sets}
    for name, own in steps.items():
        output = str(folder / name)
        yield CorpusConfig.model_validate({**settings, **own, "name": name, "output": output})


def peaks(config: CorpusConfig) -> dict[str, Peak]:
    """The peak of each stage of a build."""
    store = LocalStore(Path(config.output))
    build = Build(config, store, inputs_of(config).files)
    found: dict[str, Peak] = {}
    for stage in table.stages_of(config):
        done = []
        for unit in stage.plan(build):
            with multiprocessing.get_context("spawn").Pool(1) as process:
                result, peak = process.apply(_measured, (stage.work, store, unit.spec))
            outputs = {name: Output(*store.written(name)) for name in (*unit.outputs, *result.files)}
            done.append(Finished(unit.name, "", result, outputs, 0.0, 0.0))
            found[stage.name] = max(found.get(stage.name, Peak(0, 0)), Peak(unit.memory, peak))
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


def peaks_of_both(folder: Path, characters: int) -> Iterator[tuple[str, str, Peak, Peak]]:
    """(corpus, stage, peak with so many `characters` of text, peak with twice as many) for each stage."""
    pairs = zip(*(configs(folder / str(size), size) for size in (characters, 2 * characters)), strict=True)
    for small, large in pairs:
        less, more = peaks(small), peaks(large)
        yield from ((small.name, stage, less[stage], more[stage]) for stage in less if stage in more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("megabytes", nargs="?", type=int, default=20)
    characters, wrong = parser.parse_args().megabytes * 1_000_000, 0
    print(f"{'corpus':11}{'stage':27}{'MB of text':>11}{'MB declared':>13}{'MB taken':>10}")
    two_files_are_merged = patch.object(merging, "group_size", return_value=2)
    with tempfile.TemporaryDirectory() as folder, two_files_are_merged:
        for corpus, stage, small, large in peaks_of_both(Path(folder), characters):
            grows = large.peak - small.peak > large.declared - small.declared + NOISE
            too_much = grows and large.peak > large.declared
            for size, one in ((characters, small), (2 * characters, large)):
                numbers = f"{size / 1e6:11.0f}{one.declared / 1e6:13.1f}{one.peak / 1e6:10.1f}"
                print(f"{corpus:11}{stage:27}{numbers}", "TOO MUCH" if too_much else "", flush=True)
            wrong += too_much
    return min(1, wrong)


if __name__ == "__main__":
    sys.exit(main())
