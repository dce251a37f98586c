"""`data-pipeline plan`: forecasts a build from the sizes of its inputs and a build that was measured.

The measured build is a calibration from the first bytes of each source, or a finished corpus with the same sources and
steps. Time and disk grow with the input, except for the tokenizer's training and the number of tokens.
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

import psutil

from data_pipeline.base import stores
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted, duration, human_size
from data_pipeline.base.open_store import open_store
from data_pipeline.base.paths import opening
from data_pipeline.base.processes import available_memory
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.engine.workers import are_small, without_ray
from data_pipeline.sources.formats import FORMATS
from data_pipeline.sources.record import Range
from data_pipeline.stages import report, table, tokenizer
from data_pipeline.stages.documents import inputs_of_units
from data_pipeline.stages.inputs import InputFile, files_of, list_files
from data_pipeline.stages.parts import Part
from data_pipeline.stages.pipeline import build
from data_pipeline.stages.stage import KEYS, NGRAMS, SHARDS, TOKENS, Amounts

_SAMPLES = (1_000_000, 4_000_000)  # stored bytes of each source; the first build is slower because of imports
_PIECES = 1000  # of the calibration's tokenizer, at most
_WORKER = 0.3e9  # bytes of a worker's data: 8 million characters of documents, the tokens of a shard
_TRAINING = 0.5e6  # bytes of sample per core-second of a tokenizer's training
_LONGER = 0.13  # relative growth of a token's bytes when the vocabulary doubles; T5's 32,000 tokens have 4.6 bytes


@dataclass(frozen=True)
class StageForecast:
    """The forecast of a stage. `megabytes`: its input; `disk`: bytes that it writes."""

    name: str
    megabytes: float
    core_seconds: float
    seconds: float
    disk: float


@dataclass(frozen=True)
class Forecast:
    """The forecast of a build. Memory and disk are in bytes.

    Attributes:
        inputs: number of input files.
        tokens: number of tokens by split.
        memory: by stage, the maximum memory of its largest unit, beside `worker_memory`.
        warnings: what may fail.
    """

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
    memory: dict[str, float]
    warnings: list[str] = field(default_factory=list)


def calibrate(config: CorpusConfig, sizes: tuple[int, ...] = _SAMPLES) -> report.Report:
    """The report of a corpus that is built in this process from the first bytes of each source's largest files.

    Builds once for each of `sizes`, the bytes of a source. Raises UserError if the build fails.
    """
    tokenizer, quiet = config.tokenizer, io.StringIO()
    if tokenizer.is_trained:
        fewer = {"vocab_size": min(_PIECES, tokenizer.pieces), "sample_bytes": 1_000_000}
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
    """`source` with the first bytes of its largest files in place of its files."""
    for file in sorted(list_files(source, output=output), key=lambda one: -one.bytes):
        sample = folder / file.name
        sample.parent.mkdir(parents=True, exist_ok=True)
        with opening(file.path), stores.open_file(file.path) as whole:
            sample.write_bytes(FORMATS[source.format].head(whole, size))
        size -= file.bytes
        if size <= 0:
            break
    return source.model_copy(update={"path": str(folder)})


def forecast_build(config: CorpusConfig, found: report.Report, measured: str, workers: int | None = None) -> Forecast:
    """The forecast of a build by `workers`, from the report `found`. None: as many workers as this machine has cores.

    A build that is too small for a cluster has one worker. Raises UserError if the report has other sources or steps.
    """
    stages = table.stages_of(config, with_urls := bool(found.with_urls))
    needed = {name for name, stage in stages.items() if stage.writes in (KEYS, NGRAMS, SHARDS)}
    lacks = {one.name for one in config.sources} - set(found.sources) | needed - {stage.name for stage in found.stages}
    if lacks:
        raise UserError(f"--speeds: the report lacks {', '.join(sorted(lacks))}; name a corpus of the same kind")
    files = files_of(config)
    size = sum(file.bytes for file in files)
    workers = 1 if are_small(size, config.ray) else workers or config.ray.num_cpus or os.cpu_count() or 1
    per_byte = {name: one.text_bytes / max(1, one.bytes) for name, one in found.sources.items()}
    text = sum(file.bytes * per_byte[file.source.name] for file in files)
    growth = text / max(1, sum(one.text_bytes for one in found.sources.values()))
    growths = {"sets": 1.0, "inputs": size / max(1, sum(one.bytes for one in found.sources.values()))}
    trained = config.tokenizer.trained_on(int(text))
    pieces = config.tokenizer.pieces if config.tokenizer.is_trained else found.pieces
    longer = 1 + _LONGER * math.log2(max(1.0, pieces / max(1, found.pieces)))
    held_out = config.split.validation_fraction
    tokens = growth / longer * sum(one.tokens + one.dropped_tokens for one in found.splits.values())
    by_split = {"train": round((1 - held_out) * tokens), "validation": round(held_out * tokens)}
    inputs = inputs_of_units(config, open_store(config.output), files, save=False)
    amounts = _amounts(config, found, inputs, growth, by_split)
    units = table.units_of(amounts, with_urls)

    forecasts = []
    for one in found.stages:
        stage = table.stage_named(one.name)
        if stage is None or not units.get(one.name):
            continue
        grown = growths.get(table.measure_of(one.name), growth)
        core_seconds = grown * one.megabytes / (one.megabytes_per_core_second or math.inf)
        disk = grown * 1e6 * one.written_megabytes / (longer if stage.writes in (TOKENS, SHARDS) else 1.0)
        if stage is tokenizer.STAGE:
            # much of the measured time doesn't grow with the sample
            measured_on = found.tokenizer_sample.bytes if found.tokenizer_sample else 0
            core_seconds = max(0.0, trained - measured_on) / _TRAINING
            core_seconds += one.core_seconds * min(1.0, trained / max(1, measured_on))
            disk = 1e6 * one.written_megabytes
        at_once = min(workers, units[one.name])
        forecasts.append(StageForecast(one.name, grown * one.megabytes, core_seconds, core_seconds / at_once, disk))
    worker_memory = psutil.Process().memory_info().rss + _WORKER  # a worker has the same imports
    memory = {name: stage.memory * stage.most(amounts) for name, stage in stages.items()}
    forecast = Forecast(
        name=config.name,
        inputs=len(files),
        measured=measured,
        workers=workers,
        stages=forecasts,
        tokens=by_split,
        seconds=sum(one.seconds for one in forecasts),
        disk=sum(one.disk for one in forecasts),
        worker_memory=worker_memory,
        tokenizer_memory=worker_memory + memory[tokenizer.STAGE.name],
        memory=memory,
    )
    return replace(forecast, warnings=list(_warnings(config, forecast, inputs)))


def as_text(found: Forecast) -> str:
    """The forecast in lines of 80 columns."""
    workers = counted(found.workers, "worker")
    shards = next((one.disk for one in found.stages if one.name == "shards"), None)
    reads = f"; training reads {human_size(shards)} (shards)" if shards else ""
    lines = [f"{found.name}: {found.inputs:,} inputs, {workers}; speeds {found.measured}"]
    lines += [f"{'stage':27}{'MB':>14}{'core-seconds':>14}{'seconds':>11}{'disk':>11}"]
    lines += [
        f"{one.name:27}{one.megabytes:>14,.1f}{one.core_seconds:>14,.0f}{one.seconds:>11,.0f}{human_size(one.disk):>11}"
        for one in found.stages
    ]
    lines += [
        f"tokens: {', '.join(f'{split} {count:,}' for split, count in found.tokens.items() if count)}",
        f"time: {duration(found.seconds)}; disk: {human_size(found.disk)}{reads}",
        f"memory: {human_size(found.worker_memory)} a worker, {human_size(found.tokenizer_memory)} for the tokenizer",
    ]
    most, name = max((size, name) for name, size in found.memory.items() if name != tokenizer.STAGE.name)
    lines.append(f"        {human_size(most)} more at most for {name}")
    return "\n".join([*lines, *(f"warning: {warning}" for warning in found.warnings)])


def _amounts(
    config: CorpusConfig,
    found: report.Report,
    inputs: list[list[tuple[InputFile, Range]]],
    growth: float,
    tokens: dict[str, int],
) -> Amounts:
    read, kept = list[Part](), list[Part]()
    for unit in inputs:
        of_source = found.sources[unit[0][0].source.name]
        share = sum((piece.stop or file.bytes) - piece.start for file, piece in unit) / max(1, of_source.bytes)
        for parts, text in ((read, of_source.text_read_bytes), (kept, of_source.text_bytes)):
            count = max(1, math.ceil(share * text / config.characters_per_part))
            size, documents = round(share * text / count), {"train": round(share * of_source.kept / count)}
            part = Part("", unit[0][0].source.name, "", size, documents, characters=size, checksums=[])
            parts += [part] * count
    return Amounts(
        config=config,
        inputs=len(inputs),
        parts=read,
        left=kept,
        documents=round(growth * found.documents.read),
        keys={one.name.removesuffix("-keys"): round(growth * one.keys) for one in found.stages if one.keys is not None},
        tokens=tokens,
        sets=sum(one.bytes for one in found.evaluation_sets.values()),
    )


def _warnings(config: CorpusConfig, found: Forecast, inputs: list[list[tuple[InputFile, Range]]]) -> Iterator[str]:
    free, output = available_memory(), open_store(config.output).disk.absolute()
    there = next(path for path in (output, *output.parents) if path.exists())
    if "://" not in config.output and found.disk > (room := shutil.disk_usage(there).free):
        yield f"output: the build writes {human_size(found.disk)}, and {human_size(room)} are free in {there}"
    for what, needed, key in (
        ("tokenizer: training takes", found.tokenizer_memory, "tokenizer.sample_bytes"),
        (f"{counted(found.workers, 'worker')} take", found.workers * found.worker_memory, "ray.num_cpus"),
    ):
        if needed > free:
            yield f"{what} {human_size(needed)} of memory, and {human_size(free)} are free here; lower {key}"
    for name, stage in table.stages_of(config).items():
        if stage is not tokenizer.STAGE and (asked := found.memory.get(name, 0)) > free:
            sizes = f"{human_size(asked)} of memory at most, and {human_size(free)} are free here"
            yield f"{name}: {sizes}; {stage.way_out}"
    whole = [file for unit in inputs for file, piece in unit if piece == Range()]
    largest = max(whole, key=lambda file: file.bytes, default=None)
    together = sum((piece.stop or file.bytes) - piece.start for unit in inputs for file, piece in unit)
    if largest and largest.bytes > 2 * together / found.workers:
        yield f"{largest.name}: one worker reads its {human_size(largest.bytes)} alone, while the others wait"
