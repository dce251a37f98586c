"""`data-pipeline plan`: a forecast of a build from the sizes of its inputs and measured speeds.

Speeds, sizes and the number of keys come from a report: of a calibration, or of a finished corpus. What a report lacks
is in one table, `_ASSUMED`; Ray's start counts only if the report has it.
"""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.keys import KeyBucket
from data_pipeline.dedup.steps import STEPS
from data_pipeline.execution import merging
from data_pipeline.execution.buckets import SPLITS
from data_pipeline.execution.inputs import InputFile, list_files, shared
from data_pipeline.execution.merging import level_name
from data_pipeline.execution.workers import are_small
from data_pipeline.foundation import memory
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted, duration, human_size
from data_pipeline.report import Report
from data_pipeline.stages import evaluation_sets, sampling
from data_pipeline.stages.tokens import token_dtype
from data_pipeline.tokenizer.training import MEMORY_PER_BYTE

_ASSUMED = {
    "row group": 0.1e9,  # bytes of memory: 8 million characters of documents, read and written
    "bytes per line": 100,  # of text, for each line or sentence, where no keys of them were measured
    "evaluation set": 10,  # bytes of memory for each byte of an evaluation set: its n-grams
    "longer tokens": 0.13,  # how much longer a token gets when the vocabulary doubles; of T5's 32,000, 4.6 bytes
    "training": 0.5e6,  # bytes per core-second that a larger sample adds to a tokenizer's training
    "pair": 10,  # bytes of memory for each byte of a file of near-duplicates: Python's sets of them
}
_MANY_OPENS = 10_000_000


@dataclass(frozen=True)
class StageForecast:
    """What one stage is expected to take. `megabytes`: of its input; `memory`: bytes of a worker, at its peak."""

    name: str
    units: int
    megabytes: float
    core_seconds: float
    seconds: float
    memory: float
    disk: float
    opens: int


@dataclass(frozen=True)
class Forecast:
    """The stages in order, the tokens by split, and what is likely to fail."""

    name: str
    measured: str
    workers: int
    ray_start: float
    inputs: int
    stages: list[StageForecast]
    tokens: dict[str, int]
    warnings: list[str]

    @property
    def seconds(self) -> float:
        return self.ray_start + sum(stage.seconds for stage in self.stages)

    @property
    def disk(self) -> float:
        return sum(stage.disk for stage in self.stages)


class _Speeds:
    """What a report says of speeds and sizes."""

    def __init__(self, report: Report, config: CorpusConfig):
        self._stages = {stage.name: stage for stage in report.stages}
        self._report, self._sources = report, report.sources
        missing = {source.name for source in config.sources} - set(self._sources)
        if missing or "tokens" not in self._stages:
            lacks = f"source {', '.join(sorted(missing))}" if missing else "the stages up to the shards"
            raise UserError(f"--speeds: the report lacks {lacks}; name a finished corpus with the same sources")
        self.pieces: int = report.pieces
        text = max(1, sum(source.text_read_bytes for source in self._sources.values()))
        self.bytes_per_document = text / max(1, report.documents.read)
        kept = max(1, sum(source.text_bytes for source in self._sources.values()))
        tokens = sum(split.tokens + split.dropped_tokens for split in report.splits.values())
        self.tokens_per_byte = tokens / kept
        self.ray_start = sum(stage.ray_start_seconds or 0.0 for stage in report.stages)

    def of(self, stage: str) -> float:
        """Bytes per core-second. A stage that wasn't measured counts as fast as reading and writing documents."""
        found = self._stages.get(stage) or self._stages.get("deduplicated") or self._stages["tokens"]
        return 1e6 * (found.megabytes_per_core_second or 1000.0)

    def written(self, stage: str) -> float | None:
        """Bytes written for each byte of input; None for a stage that wasn't measured."""
        found = self._stages.get(stage)
        return found.written_megabytes / found.megabytes if found and found.megabytes else None

    def keys(self, stage: str) -> float | None:
        """Keys gathered for each byte of input; None for a stage that wasn't measured."""
        found = self._stages.get(stage)
        return found.keys / (1e6 * found.megabytes) if found and found.keys and found.megabytes else None

    def text(self, source: str, key: str) -> float:
        """Bytes of text, before (`text_read_bytes`) or after deduplication, for each byte of a source."""
        found = self._sources[source]
        return getattr(found, key) / max(1, found.bytes)

    def training(self, sample_bytes: float) -> float:
        """Core-seconds of the tokenizer's training.

        Much of it doesn't depend on the sample, so what a larger sample adds has a speed of its own.
        """
        sample = self._report.tokenizer_sample
        measured, seconds = (sample.bytes, self._stages["tokenizer"].core_seconds) if sample else (0, 0.0)
        more = max(0.0, sample_bytes - measured) / _ASSUMED["training"]
        return more + seconds * min(1.0, sample_bytes / max(1, measured))


def forecast_build(config: CorpusConfig, report: Report, measured: str, workers: int | None = None) -> Forecast:
    """The forecast of a build by `workers` (all of this machine's cores by default) at the speeds of `report`.

    A build that is too small for a cluster has one worker.
    """
    speeds = _Speeds(report, config)
    files = [file for source in config.sources for file in list_files(source, output=Path(config.output))]
    small = are_small(sum(file.bytes for file in files), config.ray)
    workers = 1 if small else workers or config.ray.num_cpus or os.cpu_count() or 1
    forecast = _Stages(config, speeds, files, workers)
    forecast.add_all()
    warnings = list(_warnings(config, forecast.stages, files, workers))
    ray_start = 0.0 if small else speeds.ray_start
    return Forecast(config.name, measured, workers, ray_start, len(files), forecast.stages, forecast.tokens, warnings)


def as_json(found: Forecast) -> dict[str, object]:
    return {**asdict(found), "seconds": found.seconds, "disk": found.disk}


def as_text(found: Forecast) -> str:
    """The forecast in lines of 80 columns."""
    lines = [
        f"{found.name}: {found.inputs:,} inputs, {counted(found.workers, 'worker')}; speeds {found.measured}",
        f"{'stage':23}{'units':>7}{'MB':>10}{'core-s':>9}{'s':>7}{'worker':>9}{'disk':>9}{'opens':>6}",
    ]
    lines += [
        f"{stage.name:23}{stage.units:>7,}{stage.megabytes:>10,.{1 if stage.megabytes < 10_000 else 0}f}"
        f"{stage.core_seconds:>9,.0f}{stage.seconds:>7,.0f}{human_size(stage.memory):>9}{human_size(stage.disk):>9}"
        f"{_thousands(stage.opens):>6}"
        for stage in found.stages
    ]
    tokens = ", ".join(f"{split} {count:,}" for split, count in found.tokens.items() if count)
    waiting = f", {found.ray_start:.0f} s of it for Ray to start" if found.ray_start else ""
    lines += [
        f"tokens: {tokens}",
        f"time: {duration(found.seconds)}{waiting}; disk: {human_size(found.disk)}",
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in found.warnings)])


class _Stages:
    """The stages of a build, added in its order."""

    def __init__(self, config: CorpusConfig, speeds: _Speeds, files: list[InputFile], workers: int):
        self._config, self._speeds, self._files, self._workers = config, speeds, files, workers
        self._worker = psutil.Process().memory_info().rss  # a worker imports what this process has imported
        self._units = shared(files, config)
        self._sizes = [sum(file.bytes for file in unit) for unit in self._units]
        read, kept = (
            [size * speeds.text(unit[0].source.name, key) for size, unit in zip(self._sizes, self._units, strict=True)]
            for key in ("text_read_bytes", "text_bytes")
        )
        self._text, self._kept = sum(read), sum(kept)
        self._parts = sum(max(1, math.ceil(text / config.characters_per_part)) for text in read)
        self._part = min(max(read), config.characters_per_part)
        self.stages: list[StageForecast] = []
        pieces = config.tokenizer.vocab_size if config.tokenizer.path is None else speeds.pieces
        longer = 1 + _ASSUMED["longer tokens"] * math.log2(max(1.0, pieces / max(1, speeds.pieces)))
        self._width = token_dtype(pieces + config.tokenizer.sentinels)().itemsize
        self._tokens_per_byte = speeds.tokens_per_byte / longer
        held_out = config.split.validation_fraction
        shares = dict(zip(SPLITS, (1 - held_out, held_out), strict=True))
        self.tokens = {split: round(share * self._kept * self._tokens_per_byte) for split, share in shares.items()}

    def add_all(self) -> None:
        ranges = [_ranges(unit[0], self._config.bytes_per_unit) if len(unit) == 1 else 1 for unit in self._units]
        largest = max(size / count for size, count in zip(self._sizes, ranges, strict=True))
        opens = 2 * (len(self._files) - len(self._units) + sum(ranges)) + self._parts
        self._add("documents", sum(ranges), sum(self._sizes), largest, _ASSUMED["row group"], opens)
        self._add_deduplication()
        self._add_tokenizer()
        self._add_shards()

    def _add(
        self,
        name: str,
        units: int,
        size: float,
        largest: float,
        memory: float,
        opens: int,
        written: float | None = None,
    ) -> None:
        """Adds a stage of `units` that work on `size` bytes, one of them on the `largest` part of them. A worker needs
        `memory` beside that of its imports. `written`: bytes, if the report doesn't tell."""
        speed = self._speeds.of(name)
        core_seconds = size / speed
        seconds = max(core_seconds / min(self._workers, units), largest / speed)
        disk = size * (self._speeds.written(name) or 0.0) if written is None else written
        self.stages.append(
            StageForecast(name, units, size / 1e6, core_seconds, seconds, self._worker + memory, disk, opens)
        )

    def _add_merges(self, merged: str, files: int, readers: int, written: float, size: float) -> int:
        """Adds the levels at which the `files` of the stage `merged`, `written` bytes, are merged; returns how many are
        left."""
        for level, group in enumerate(merging.group_sizes(files, readers), 1):
            units = -(-files // group)
            self._add(level_name(merged, level), units, size, 0.0, _ASSUMED["row group"], files + units, written)
            files = units
        return files

    def _add_deduplication(self) -> None:
        parts, text, part, group = self._parts, self._text, self._part, _ASSUMED["row group"]
        opens = 2  # a reading opens a part, what the last step decided, tables of changes, and what it writes
        for number, step in enumerate(self._config.steps):
            opens += min(number, 2)
            if step == "filters":
                self._add("page-filters", parts, text, part, group, parts * opens)
                opens = 2 + 1
                continue
            if step == "decontamination":
                size = float(evaluation_sets.plan(self._config.decontamination)[0].bytes)
                ngrams = _ASSUMED["evaluation set"] * size
                self._add("evaluation-sets", 1, size, size, 3 * ngrams, 2)
                self._add("decontamination", parts, text, part, ngrams + group, parts * (1 + opens))
                opens = 2 + 1
                continue
            words = STEPS[step].group + STEPS[step].order + 1  # of a key: its group, its order and its place
            keys = self._keys(step)
            in_memory = 2 * 8 * words + 24  # of a key: read and sorted, with its unit, its order and what is decided
            memory = group + 2 * in_memory * keys * part / text
            self._add(f"{step}-keys", parts, text, part, memory, parts * opens)
            buckets = KeyBucket.enough(round(keys), self._config.dedup.keys_per_bucket)
            files = self._add_merges(f"{step}-keys", parts, buckets, keys * (8 * words + 4), text)
            memory = in_memory * min(keys / buckets, 2 * self._config.dedup.keys_per_bucket)
            self._add(f"{step}-duplicates", buckets, text, text / buckets, memory, buckets * (files + 1))
            written = text * (self._speeds.written(f"{step}-duplicates") or 0.0)
            if STEPS[step].clusters:
                self._add("minhash-clusters", 1, text, text, _ASSUMED["pair"] * written, files + buckets)
                opens = 2 + 1
            else:
                opens = 2 + self._add_merges(f"{step}-duplicates", buckets, parts, written, text)
        if steps := self._config.steps:
            self._add("deduplicated", parts, text, part, group, parts * (opens + (len(steps) > 1)))

    def _keys(self, step: str) -> float:
        """The number of keys of a step: as many as were gathered, or one for each document, or for each line."""
        gathered = self._speeds.keys(f"{step}-keys")
        if step in ("urls", "documents") or (step == "minhash" and gathered is None):
            return self._text / self._speeds.bytes_per_document
        return self._text / _ASSUMED["bytes per line"] if gathered is None else self._text * gathered

    def _add_tokenizer(self) -> None:
        """A tokenizer is trained on one core, on a sample, or copied. Of many documents, workers choose candidates."""
        config, text, files = self._config.tokenizer, self._kept, self._parts
        if config.path is not None:
            self.stages.append(StageForecast("tokenizer", 1, 0.0, 0.0, 0.0, self._worker, 0.0, 2))
            return
        sample = min(text, config.sample_bytes)
        if sampling.is_large(config, text, text / self._speeds.bytes_per_document):
            files = min(self._parts, sampling.units_of(text))
            opens = self._parts + files
            self._add(sampling.STAGE.name, files, text, text / files, _ASSUMED["row group"], opens, 2 * sample)
        seconds = self._speeds.training(sample)
        memory = self._worker + MEMORY_PER_BYTE * sample
        self.stages.append(StageForecast("tokenizer", 1, text / 1e6, seconds, seconds, memory, 1e6, files))

    def _add_shards(self) -> None:
        config, text, parts, tokens = self._config, self._kept, self._parts, sum(self.tokens.values())
        shards = sum(config.buckets(count) for count in self.tokens.values() if count)
        memory = _ASSUMED["row group"] + 3 * self._part * self._tokens_per_byte * self._width
        self._add("tokens", parts, text, self._part, memory, 2 * parts, 1.1 * self._width * tokens)
        files = self._add_merges("tokens", parts, shards, 1.1 * self._width * tokens, text)
        memory, opens = 4 * self._width * min(config.tokens_per_shard, tokens), shards * (files + 1)
        if config.rows.packing != "concatenate":
            self._add("rows", shards, text, text / shards, memory, opens, 0.0)
        self._add("shards", shards, text, text / shards, memory, opens, 1.02 * self._width * tokens)


def _ranges(file: InputFile, bytes_per_unit: int) -> int:
    """The units that read one input. A dump of many streams is cut when the build starts; its name tells."""
    many = file.source.format == "wikipedia" and "multistream" in file.name
    return max(1, math.ceil(file.bytes / bytes_per_unit)) if many else 1


def _warnings(config: CorpusConfig, stages: list[StageForecast], files: list[InputFile], workers: int) -> Iterator[str]:
    free = memory.available()
    there = next(
        path for path in (Path(config.output).absolute(), *Path(config.output).absolute().parents) if path.exists()
    )
    disk, needed = shutil.disk_usage(there).free, sum(stage.disk for stage in stages)
    if needed > disk:
        yield f"output: the build writes {human_size(needed)}, and {human_size(disk)} are free in {there}"
    for stage in stages:
        at_once = min(workers, stage.units) * stage.memory
        if at_once > free:
            many = f"{min(workers, stage.units):,} workers take" if stage.units > 1 else "takes"
            way_out = "tokenizer.sample_bytes" if stage.name == "tokenizer" else "ray.num_cpus"
            need = f"{many} {human_size(at_once)} of memory, and {human_size(free)} are free here"
            yield f"{stage.name}: {need}; lower {way_out}"
        if stage.opens > _MANY_OPENS:
            yield f"{stage.name}: opens {stage.opens:,} files: {duration(stage.opens * 1e-3 / workers)} at 1 ms each"
    largest = max(files, key=lambda file: file.bytes)
    total = sum(file.bytes for file in files)
    if len(files) > 1 and largest.bytes > 2 * total / workers and _ranges(largest, config.bytes_per_unit) == 1:
        yield f"{largest.name}: one worker reads its {human_size(largest.bytes)} alone, while the others wait"


def _thousands(count: int) -> str:
    """1200000 -> "1M", 12000 -> "12k"."""
    return f"{count / 1e6:,.0f}M" if count >= 1_000_000 else f"{count / 1e3:,.0f}k" if count >= 10_000 else f"{count:,}"
