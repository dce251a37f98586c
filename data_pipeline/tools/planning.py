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
from typing import Any

import psutil

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted, duration, human_size
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.open_store import open_store
from data_pipeline.base.processes import available_memory
from data_pipeline.base.stores import open_file
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.engine.work_units import Finished, Output, Result, Unit
from data_pipeline.engine.workers import are_small, without_ray
from data_pipeline.sources.formats import FORMATS
from data_pipeline.sources.record import Range
from data_pipeline.stages import documents, evaluation_sets, report, shards, table, tokenizer, tokens
from data_pipeline.stages.dedup import LAST, KeysResult, KeysSpec
from data_pipeline.stages.documents import InputsRead
from data_pipeline.stages.evaluation_sets import EvaluationSetsResult, ReadSet
from data_pipeline.stages.inputs import InputFile, inputs_of, list_inputs
from data_pipeline.stages.kinds import KEYS, NGRAMS, SHARDS, TOKENS
from data_pipeline.stages.parts import PartsWritten, WrittenPart
from data_pipeline.stages.pipeline import build
from data_pipeline.stages.stage import AnyStage, Build
from data_pipeline.stages.tokenizer import Candidates
from data_pipeline.stages.tokens import TokensWritten

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
    memory: dict[str, int]
    warnings: list[str] = field(default_factory=list)


def calibrate(config: CorpusConfig, sizes: tuple[int, ...] = _SAMPLES) -> report.Report:
    """The report of a corpus that is built in this process from the first bytes of each source's largest files.

    Builds once for each of `sizes`, the bytes of a source. Raises UserError if the build fails.
    """
    trained, quiet = config.tokenizer, io.StringIO()
    if trained.is_trained:
        fewer = {"vocab_size": min(_PIECES, trained.pieces), "sample_bytes": 1_000_000}
        trained = trained.model_copy(update=fewer)
    with tempfile.TemporaryDirectory() as temporary, without_ray():
        for size in sizes:
            folder = Path(temporary, str(size))
            sources = [
                _sampled(source, folder / "sources" / source.name, size, config.output) for source in config.sources
            ]
            changed = {"sources": sources, "output": str(folder / "corpus"), "tokenizer": trained}
            try:
                with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                    found = report.read(build(config.model_copy(update=changed)))
            except UserError as error:
                raise UserError(f"the calibration failed: {error}") from None
    return found


def _sampled(source: SourceConfig, folder: Path, size: int, output: str) -> SourceConfig:
    """`source` with the first bytes of its largest files in place of its files."""
    for file in sorted(list_inputs(source, output=output).files, key=lambda one: -one.bytes):
        sample = folder / file.name
        sample.parent.mkdir(parents=True, exist_ok=True)
        with open_file(file.path) as whole:
            sample.write_bytes(FORMATS[source.format].head(whole, size))
        size -= file.bytes
        if size <= 0:
            break
    return source.model_copy(update={"path": str(folder), "hidden": True})  # as the path may name them


def forecast_build(config: CorpusConfig, found: report.Report, measured: str, workers: int | None = None) -> Forecast:
    """The forecast of a build by `workers`, from the report `found`. None: as many workers as this machine has cores.

    A build that is too small for a cluster has one worker. Raises UserError if the report has other sources or steps.
    """
    files = inputs_of(config).files
    size = sum(file.bytes for file in files)
    if lacks := {one.name for one in config.sources} - set(found.sources):
        raise _of_another_kind(lacks)
    workers = 1 if are_small(size, config.ray) else workers or config.ray.num_cpus or os.cpu_count() or 1
    per_byte = {name: one.text_bytes / max(1, one.bytes) for name, one in found.sources.items()}
    text = sum(file.bytes * per_byte[file.source.name] for file in files)
    growth = text / max(1, sum(one.text_bytes for one in found.sources.values()))
    growths = {"sets": 1.0, "inputs": size / max(1, sum(one.bytes for one in found.sources.values()))}
    trained = config.tokenizer.trained_on(int(text))
    grow = config.tokenizer.is_trained and config.tokenizer.tokens_grow
    pieces = config.tokenizer.pieces if grow else found.pieces
    longer = 1 + _LONGER * math.log2(max(1.0, pieces / max(1, found.pieces)))
    held_out = config.split.validation_fraction
    all_tokens = growth / longer * sum(one.tokens + one.dropped_tokens for one in found.splits.values())
    by_split = {"train": round((1 - held_out) * all_tokens), "validation": round(held_out * all_tokens)}
    planned = _planned(config, files, _Expected(found, growth, by_split))
    measured_stages = {one.name: one for one in found.stages}
    if (
        lacks := {
            stage.name
            for stage, _ in planned
            if stage.writes in (KEYS, NGRAMS, SHARDS) and stage.writes not in stage.reads
        }
        - measured_stages.keys()
    ):
        raise _of_another_kind(lacks)

    forecasts = []
    for stage, units in planned:
        if (one := measured_stages.get(stage.name)) is None:
            continue
        grown = growths.get(stage.reads[0].of, growth)
        core_seconds = grown * one.megabytes / (one.megabytes_per_core_second or math.inf)
        disk = grown * 1e6 * one.written_megabytes / (longer if stage.writes in (TOKENS, SHARDS) else 1.0)
        if stage is tokenizer.STAGE:
            # much of the measured time doesn't grow with the sample
            measured_on = found.tokenizer_sample.bytes if found.tokenizer_sample else 0
            core_seconds = max(0.0, trained - measured_on) / _TRAINING
            core_seconds += one.core_seconds * min(1.0, trained / max(1, measured_on))
            disk = 1e6 * one.written_megabytes
        at_once = min(workers, len(units))
        forecasts.append(StageForecast(one.name, grown * one.megabytes, core_seconds, core_seconds / at_once, disk))
    worker_memory = psutil.Process().memory_info().rss + _WORKER  # a worker has the same imports
    memory = {stage.name: max(unit.memory for unit in units) for stage, units in planned}
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
    return replace(forecast, warnings=list(_warnings(config, forecast, planned)))


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


def _of_another_kind(lacks: set[str]) -> UserError:
    return UserError(f"--speeds: the report lacks {', '.join(sorted(lacks))}; name a corpus of the same kind")


Planned = list[tuple[AnyStage, list[Unit[Any]]]]


def _planned(config: CorpusConfig, files: list[InputFile], expected: "_Expected") -> Planned:
    """The units of each stage that has any, as a build would plan them if its units had the results `expected`."""
    planned: Planned = []
    with tempfile.TemporaryDirectory() as folder:  # for lists of files; nothing is written to the corpus
        build = Build(config, LocalStore(Path(folder)), files)
        for stage in table.stages_of(config):
            units = stage.plan(build)
            if units:
                planned.append((stage, units))
            build.units[stage.name] = expected.finished(stage, units, build)
    return planned


class _Expected:
    """The results that the units of a build are expected to have, by the report of a measured build.

    `growth`: how much more text the build has than the measured build; `tokens`: its tokens by split.
    """

    def __init__(self, found: report.Report, growth: float, tokens: dict[str, int]):
        self._sources, self._tokens, self._with_urls = found.sources, tokens, min(1, found.with_urls)
        self._keys = {one.name: round(growth * one.keys) for one in found.stages if one.keys is not None}

    def finished(self, stage: AnyStage, units: list[Unit[Any]], build: Build) -> list[Finished[Any]]:
        """The `units` of `stage` with their results."""
        done = []
        for number, unit in enumerate(units):
            result = self._result(stage, unit, build.config, first=number == 0)
            outputs = {name: Output(0, "") for name in (*unit.outputs, *result.files)}
            done.append(Finished(unit.name, "", result, outputs, 0.0, 0.0))
        if stage is shards.COUNT and not units:  # rows give shards their numbers, not their size
            buckets = tokens.buckets_of(build.config, build.of(tokens.STAGE))
            done = [Finished("", "", shards.RowsResult(0), {}, 0.0, 0.0)] * len(buckets)
        return done

    def _result(self, stage: AnyStage, unit: Unit[Any], config: CorpusConfig, first: bool) -> Result:
        """The result of a unit. The `first` has all keys or tokens of a stage, since plans take their sum."""
        if stage is documents.STAGE:
            source = self._sources[unit.spec.name]
            part = unit.bytes / max(1, source.bytes)
            read = self._parts(unit, unit.spec.name, part * source.text_read_bytes, part * source.read, config)
            return InputsRead(source=unit.spec.name, inputs=[], parts=read.parts, with_urls=read.with_urls)
        if stage is LAST:
            name, size = unit.spec.parts[0].source, sum(part.text_bytes for part in unit.spec.parts)
            part = size / max(1, self._sources[name].text_read_bytes)
            return self._parts(unit, name, part * self._sources[name].text_bytes, part * self._sources[name].kept)
        if isinstance(unit.spec, KeysSpec):
            return KeysResult(self._keys.get(stage.name, 0) if first else 0)
        if stage is tokens.STAGE:
            return TokensWritten({split: first * count for split, count in self._tokens.items()})
        if stage is tokenizer.SAMPLING:
            return Candidates(0, 0)
        if stage is evaluation_sets.STAGE:
            return EvaluationSetsResult([ReadSet("", unit.bytes, 0, 0)])
        return Result()

    def _parts(
        self, unit: Unit[Any], source: str, text: float, documents: float, config: CorpusConfig | None = None
    ) -> PartsWritten:
        """The result of a unit that writes parts, as many as `config` asks for."""
        count = max(1, math.ceil(text / config.characters_per_part)) if config else 1
        size, of_each = round(text / count), {"train": round(documents / count)}
        written = [
            WrittenPart(f"{unit.name}_{number:05d}", source, unit.name, size, of_each, characters=size)
            for number in range(count)
        ]
        return PartsWritten(parts=written, with_urls=self._with_urls)


def _warnings(config: CorpusConfig, found: Forecast, planned: Planned) -> Iterator[str]:
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
    for stage, _ in planned:
        if stage is not tokenizer.STAGE and (asked := found.memory[stage.name]) > free:
            sizes = f"{human_size(asked)} of memory at most, and {human_size(free)} are free here"
            yield f"{stage.name}: {sizes}; {stage.way_out}"
    reading = next(units for stage, units in planned if stage is documents.STAGE)
    alone = [unit for unit in reading if len(unit.spec.inputs) == 1 and unit.spec.inputs[0].range == Range()]
    largest = max(alone, key=lambda unit: unit.bytes, default=None)
    if largest and largest.bytes > 2 * sum(unit.bytes for unit in reading) / found.workers:
        alone_with = f"one worker reads its {human_size(largest.bytes)} alone, while the others wait"
        yield f"{largest.spec.inputs[0].file}: {alone_with}"
