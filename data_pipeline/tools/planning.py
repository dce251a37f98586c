"""`data-pipeline plan`: a forecast of a build, from the sizes of its inputs and one build that was measured.

That is a calibration, which builds from the first bytes of each source, or a finished corpus with the same sources and
steps. Work and disk grow with the input; only a tokenizer's training and its tokens don't.
"""

import contextlib
import io
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import fsspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline import report
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.execution.inputs import InputFile, list_files, shared
from data_pipeline.execution.workers import are_small, without_ray
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted, duration, human_size
from data_pipeline.foundation.paths import opening
from data_pipeline.foundation.processes import available_memory
from data_pipeline.pipeline import build
from data_pipeline.stages.part_readings import CHECKS
from data_pipeline.tokenizer.training import MEMORY_PER_BYTE

_SAMPLES = (1_000_000, 4_000_000)  # bytes of each source, as stored; the first build pays for imports
_PIECES = 1000  # of the calibration's tokenizer, at most
_WORKER = 0.3e9  # bytes of memory beside what is imported: 8 million characters of documents, the tokens of a shard
_TRAINING = 0.5e6  # bytes per core-second that a larger sample adds to a tokenizer's training
_LONGER = 0.13  # how much longer a token gets when the vocabulary doubles; of T5's 32,000, 4.6 bytes


@dataclass(frozen=True)
class StageForecast:
    """What one stage is expected to take. `megabytes`: of its input; `disk`: bytes that it writes."""

    name: str
    megabytes: float
    core_seconds: float
    seconds: float
    disk: float


@dataclass(frozen=True)
class Forecast:
    """`inputs` are files, `tokens` counted by split; memory and disk are in bytes. `warnings`: what may fail."""

    name: str
    inputs: int
    measured: str
    workers: int
    stages: list[StageForecast]
    tokens: dict[str, int]
    seconds: float
    disk: float
    worker_memory: float
    tokenizer_memory: float
    warnings: list[str] = field(default_factory=list)


def calibrate(config: CorpusConfig, sizes: tuple[int, ...] = _SAMPLES) -> report.Report:
    """The report of a corpus built in this process from the first bytes of each source's largest files.

    It is built once for each of `sizes`, the bytes of a source. Raises UserError if it can't be built.
    """
    tokenizer, quiet = config.tokenizer, io.StringIO()
    if tokenizer.path is None:
        fewer = {"vocab_size": min(_PIECES, tokenizer.vocab_size), "sample_bytes": 1_000_000}
        tokenizer = tokenizer.model_copy(update=fewer)
    with tempfile.TemporaryDirectory() as temporary, without_ray():
        for size in sizes:
            folder = Path(temporary, str(size))
            sources = [
                _sampled(source, folder / "sources" / source.name, size, config.output) for source in config.sources
            ]
            changed = {"sources": sources, "output": str(folder / "corpus"), "tokenizer": tokenizer}
            try:
                with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                    found = report.read(build(config.model_copy(update=changed)))
            except UserError as error:
                raise UserError(f"the calibration failed: {error}") from None
    return found


def _sampled(source: SourceConfig, folder: Path, size: int, output: str) -> SourceConfig:
    """`source` with the first bytes of its largest files in its place. A file cut short is read up to the cut."""
    for file in sorted(list_files(source, output=Path(output)), key=lambda one: -one.bytes):
        sample = folder / file.name
        sample.parent.mkdir(parents=True, exist_ok=True)
        with opening(file.path), fsspec.open(file.path, "rb") as whole:
            if source.format == "parquet":  # it can't be read without its end
                parquet = pq.ParquetFile(whole)
                rows = max(1, parquet.metadata.num_rows * min(size, file.bytes) // max(1, file.bytes))
                pq.write_table(pa.Table.from_batches([next(parquet.iter_batches(rows))], parquet.schema_arrow), sample)
            else:
                sample.write_bytes(whole.read(size))
        size -= file.bytes
        if size <= 0:
            break
    return source.model_copy(update={"path": str(folder)})


def forecast_build(config: CorpusConfig, found: report.Report, measured: str, workers: int | None = None) -> Forecast:
    """The forecast of a build by `workers` (all of this machine's cores by default), from the report `found`.

    A build that is too small for a cluster has one worker. Raises UserError if the report is of other sources or steps.
    """
    needed = {f"{step}-keys" for step in config.steps if step not in CHECKS} | {"shards"}
    needed |= {"evaluation-sets"} if config.decontamination.sets else set()
    lacks = {one.name for one in config.sources} - set(found.sources) | needed - {stage.name for stage in found.stages}
    if lacks:
        raise UserError(f"--speeds: the report lacks {', '.join(sorted(lacks))}; name a corpus of the same kind")
    files = [file for source in config.sources for file in list_files(source, output=Path(config.output))]
    size = sum(file.bytes for file in files)
    workers = 1 if are_small(size, config.ray) else workers or config.ray.num_cpus or os.cpu_count() or 1
    per_byte = {name: one.text_bytes / max(1, one.bytes) for name, one in found.sources.items()}
    text = sum(file.bytes * per_byte[file.source.name] for file in files)
    growth = text / max(1, sum(one.text_bytes for one in found.sources.values()))
    growths = {"evaluation-sets": 1.0, "documents": size / max(1, sum(one.bytes for one in found.sources.values()))}
    units = {"tokenizer": 1, "evaluation-sets": 1} | {f"{step}-clusters": 1 for step in config.steps}
    units["documents"] = sum(_units(unit[0], config) for unit in shared(files, config))
    trained = 0.0 if config.tokenizer.path else min(text, config.tokenizer.sample_bytes)
    pieces = found.pieces if config.tokenizer.path else config.tokenizer.vocab_size
    longer = 1 + _LONGER * math.log2(max(1.0, pieces / max(1, found.pieces)))

    stages = []
    for one in found.stages:
        grown = growths.get(one.name, growth)
        core_seconds = grown * one.megabytes / (one.megabytes_per_core_second or math.inf)
        disk = grown * 1e6 * one.written_megabytes / (longer if one.name.startswith(("tokens", "shards")) else 1.0)
        if one.name == "tokenizer":
            # much of the time that was measured doesn't depend on the bytes of the sample
            measured_on = found.tokenizer_sample.bytes if found.tokenizer_sample else 0
            core_seconds = max(0.0, trained - measured_on) / _TRAINING
            core_seconds += one.core_seconds * min(1.0, trained / max(1, measured_on))
            disk = 1e6 * one.written_megabytes
        at_once = min(workers, units.get(one.name, max(1, math.ceil(text / config.characters_per_part))))
        stages.append(StageForecast(one.name, grown * one.megabytes, core_seconds, core_seconds / at_once, disk))
    tokens = growth / longer * sum(one.tokens + one.dropped_tokens for one in found.splits.values())
    held_out = config.split.validation_fraction
    worker_memory = psutil.Process().memory_info().rss + _WORKER  # a worker imports what this process has imported
    forecast = Forecast(
        name=config.name,
        inputs=len(files),
        measured=measured,
        workers=workers,
        stages=stages,
        tokens={"train": round((1 - held_out) * tokens), "validation": round(held_out * tokens)},
        seconds=sum(one.seconds for one in stages),
        disk=sum(one.disk for one in stages),
        worker_memory=worker_memory,
        tokenizer_memory=worker_memory + MEMORY_PER_BYTE * trained,
    )
    return replace(forecast, warnings=list(_warnings(config, forecast, files)))


def as_text(found: Forecast) -> str:
    """The forecast in lines of 80 columns."""
    workers = counted(found.workers, "worker")
    lines = [f"{found.name}: {found.inputs:,} inputs, {workers}; speeds {found.measured}"]
    lines += [f"{'stage':27}{'MB':>14}{'core-seconds':>14}{'seconds':>11}{'disk':>11}"]
    lines += [
        f"{one.name:27}{one.megabytes:>14,.1f}{one.core_seconds:>14,.0f}{one.seconds:>11,.0f}{human_size(one.disk):>11}"
        for one in found.stages
    ]
    lines += [
        f"tokens: {', '.join(f'{split} {count:,}' for split, count in found.tokens.items() if count)}",
        f"time: {duration(found.seconds)}; disk: {human_size(found.disk)}",
        f"memory: {human_size(found.worker_memory)} a worker, {human_size(found.tokenizer_memory)} for the tokenizer",
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in found.warnings)])


def _units(file: InputFile, config: CorpusConfig) -> int:
    """The units that read a file. A dump of many streams is cut when the build starts; its name tells."""
    many = file.source.format == "wikipedia" and "multistream" in file.name
    return max(1, math.ceil(file.bytes / config.bytes_per_unit)) if many else 1


def _warnings(config: CorpusConfig, found: Forecast, files: list[InputFile]) -> Iterator[str]:
    free, output = available_memory(), Path(config.output).absolute()
    there = next(path for path in (output, *output.parents) if path.exists())
    if found.disk > (room := shutil.disk_usage(there).free):
        yield f"output: the build writes {human_size(found.disk)}, and {human_size(room)} are free in {there}"
    for what, needed, key in (
        ("tokenizer: training takes", found.tokenizer_memory, "tokenizer.sample_bytes"),
        (f"{counted(found.workers, 'worker')} take", found.workers * found.worker_memory, "ray.num_cpus"),
    ):
        if needed > free:
            yield f"{what} {human_size(needed)} of memory, and {human_size(free)} are free here; lower {key}"
    largest = max(files, key=lambda file: file.bytes)
    if largest.bytes > 2 * sum(file.bytes for file in files) / found.workers and _units(largest, config) == 1:
        yield f"{largest.name}: one worker reads its {human_size(largest.bytes)} alone, while the others wait"
