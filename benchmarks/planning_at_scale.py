"""What does the driver of a build take, in time and memory, where there are tens of thousands of files and shards?

    python benchmarks/planning_at_scale.py [--files 56000] [--shards 4200] [--units 2000] [--folder DIR]

A simulated crawl: `files` inputs of one line, of which the stages `documents` and `tokens` are done. Their records and
files are written by this script, all else is the build's own code: inputs are listed, units planned, every record and
every file's size checked, the files of tokens merged (in this process, one unit after the other), shards planned and
some of their buckets read. Then Ray runs `units` units that do nothing. Seconds are those of this process; a worker's
are not in them, except in `merge` and `read`, which are a worker's work. `memory` is what this process has more than
before, at its peak.
"""

import argparse
import contextlib
import io
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from data_pipeline.config import CorpusConfig
from data_pipeline.execution import merging, ownership
from data_pipeline.execution.buckets import SPLITS, TokenBucket, count_tokens, read_bucket
from data_pipeline.execution.parts import Histograms, PartsResult, WrittenPart, parts_of
from data_pipeline.execution.work_units import (
    Finished,
    Output,
    Result,
    Stage,
    Unit,
    outputs_of,
    run,
)
from data_pipeline.execution.workers import without_ray
from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.stages import documents, shards, tokens
from data_pipeline.stages.documents import DocumentsResult, DocumentsSpec, InputResult
from data_pipeline.stages.tokenizer import Sample, TokenizerResult
from data_pipeline.stages.tokens import TokensResult, TokensSpec
from data_pipeline.text.tally import Tally

TOKENS_IN_ROW = 18  # of the objective below
DISTINCT = 100  # files of tokens; the others are links to them
TRAINED = Finished("spiece", "", TokenizerResult(1, Sample()), {"tokenizer/spiece.model": Output(1, "0" * 64)}, 1.0)


class Costs:
    """Seconds and memory of each step, in a table."""

    def __init__(self) -> None:
        self.table = Table("step", "s", "MB", "opened or checked")

    @contextlib.contextmanager
    def of(self, step: str, files: int = 0) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is used now
        before, started = _memory("VmRSS"), time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
        seconds, peak = time.monotonic() - started, _memory("VmHWM") - before
        self.table.add_row(step, f"{seconds:,.1f}", f"{peak / 1e6:,.0f}", f"{files:,}" if files else "")
        Console(width=100).print(f"{step}: {seconds:.1f} s, {peak / 1e6:.0f} MB")


def _memory(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])


def write_inputs(folder: Path, files: int) -> None:
    folder.mkdir()
    for number in range(files):
        (folder / f"{number:06d}.txt").write_text("One line.\n")


def commit(corpus: Path, stage: Stage, unit: Unit, result: Result, outputs: dict[str, Output]) -> None:
    """Writes a unit's record, as a worker does, but doesn't wait for the disk."""
    finished = Finished(unit.name, stage.fingerprint(unit), result, outputs, 1.0)
    (corpus / ".stages" / stage.name / f"{unit.name}.json").write_bytes(to_json(finished))


def do_documents(corpus: Path, units: list[Unit[DocumentsSpec]]) -> None:
    """The records and (empty) files of the stage `documents`: one part each."""
    for folder in (".stages/documents", "documents"):
        (corpus / folder).mkdir(parents=True, exist_ok=True)
    for unit in units:
        path = f"documents/{unit.name}.parquet"
        (corpus / path).touch()
        (of,) = unit.spec.inputs
        part = WrittenPart(path, unit.spec.name, unit.spec.identity(of.file, 0), 10, {"train": 1})
        counted: dict[str, Any] = vars(PartsResult.of(Tally(), [part], Histograms()))
        read = InputResult(of.file, of.range, "ok", documents=1, damaged=0, damage=[], bytes=10)
        result = DocumentsResult(source=unit.spec.name, inputs=[read], **counted)
        commit(corpus, documents.STAGE, unit, result, {path: Output(0, fingerprint(unit.name))})


def do_tokens(corpus: Path, units: list[Unit[TokensSpec]], each: int) -> None:
    """The records and files of the stage `tokens`: documents of 1 to 2 × `each` tokens, three in a file."""
    folder, chance = corpus / ".stages" / "tokens", np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number, unit in enumerate(units):
        (output,) = unit.outputs
        path = corpus / output
        if number < DISTINCT:
            lengths = {"train": chance.multinomial(each, [1 / 3] * 3), "validation": np.zeros(0, np.int64)}
            arrays = {}
            for split in SPLITS:
                count = len(lengths[split])
                arrays[f"{split}.hashes"] = np.sort(chance.integers(0, 2**64, count, np.uint64))
                arrays[f"{split}.offsets"] = np.cumsum([0, *lengths[split]]).astype(np.int64)
                arrays[f"{split}.tokens"] = np.ones(int(lengths[split].sum()), np.uint16)
            save_file(arrays, path)
        else:
            os.link(corpus / units[number % DISTINCT].outputs[0], path)
        result = TokensResult({"train": each, "validation": 0})
        commit(corpus, tokens.STAGE, unit, result, {output: Output(path.stat().st_size, fingerprint(unit.name))})


def nothing(corpus: Path, spec: int) -> Result:
    return Result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=56_000)
    parser.add_argument("--shards", type=int, default=4_200)
    parser.add_argument("--units", type=int, default=2_000, help="that Ray runs; 0: Ray isn't started")
    parser.add_argument("--buckets-read", type=int, default=100)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))  # what most systems allow
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure(Path(folder), arguments)


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    files, wanted = arguments.files, arguments.shards
    rows = max(1, -(-20 * files // (wanted * TOKENS_IN_ROW)))  # of a shard, so that a file has about 20 tokens
    config = CorpusConfig.model_validate(
        {
            "name": "simulated",
            "output": str(folder / "corpus"),
            "sources": [{"format": "text", "path": str(folder / "inputs")}],
            "bytes_per_shared_unit": 0,  # these files stand for large ones
            "dedup": {"urls": None, "lines": False, "documents": False},
            "cleaning": {"profile": "none"},
            "rows": {"objective": {"name": "span_corruption", "inputs_length": 16}},
            "shards": {"rows_per_block": rows, "blocks_per_shard": 1},
        }
    )
    corpus, ray, costs = Path(config.output), config.ray, Costs()
    write_inputs(folder / "inputs", files)
    with costs.of("documents: list inputs, plan", files):
        to_read = documents.plan(config, corpus)
    do_documents(corpus, to_read)
    with costs.of("documents: check what is done", 2 * files):
        read = run(documents.STAGE, to_read, corpus, ray)
    parts = parts_of(read)
    with costs.of("tokens: plan"):
        to_tokenize = tokens.plan(config, parts, TRAINED)
    do_tokens(corpus, to_tokenize, config.tokens_per_shard * wanted // files)
    with costs.of("tokens: check what is done", 2 * files):
        tokenized = run(tokens.STAGE, to_tokenize, corpus, ray)
    buckets = shards.buckets_of(config, tokenized)
    originals = list(outputs_of(tokenized))
    with costs.of("read: one bucket, of files that aren't merged", files):
        read_bucket(corpus, originals, buckets[0])
    with costs.of("tokens-merged: merge, all units here", files), without_ray():
        merged, levels = merging.merge(tokens.MERGING, outputs_of(tokenized), len(buckets), corpus, ray)
    with costs.of("tokens-merged: check what is done", 2 * len(merged)):
        merging.merge(tokens.MERGING, outputs_of(tokenized), len(buckets), corpus, ray)
    with costs.of("shards: count the tokens of each bucket", len(merged)):
        count_tokens(corpus, merged, buckets)
    with costs.of("shards: plan"):
        counted = [Finished("", "", shards.RowsResult(1), {}, 1.0)] * len(buckets)
        planned = shards.plan(config, corpus, tokenized, merged, TRAINED, counted)
    some = [TokenBucket("train", at, len(buckets) - 1) for at in range(0, len(buckets) - 1, 1 + len(buckets) // 100)]
    some = some[: arguments.buckets_read]
    with costs.of(f"read: {len(some)} buckets, of merged files", len(some) * len(merged)):
        for bucket in some:
            read_bucket(corpus, merged, bucket)
    if arguments.units:
        stage = Stage("nothing", 1, nothing, "")
        (corpus / "nothing").mkdir()
        with costs.of("Ray's start, and one unit"):
            run(stage, [Unit("first", 0, "")], corpus, ray)
        with costs.of(f"schedule {arguments.units:,} units that do nothing"):
            run(stage, [Unit(f"{number}", number, "") for number in range(arguments.units)], corpus, ray)
    ownership.release(corpus)
    sent = max(len(to_json(unit)) for unit in planned)
    console = Console(width=100)
    console.print(costs.table)
    groups = [len(units) for units in levels.values()]
    opens = files + len(merged) * (len(planned) + 1)
    console.print(
        f"{files:,} files, merged to {groups}; {len(planned):,} shards, each unit is sent up to {sent:,} bytes"
    )
    console.print(f"files opened for shards: {files * len(planned):,} without merging, {opens:,} with it")


if __name__ == "__main__":
    main()
