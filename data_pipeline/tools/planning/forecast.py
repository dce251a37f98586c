"""`data-pipeline plan`: a forecast of a build from the sizes of its inputs and measured speeds."""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.keys import KeyBucket
from data_pipeline.dedup.minhash import shape
from data_pipeline.execution import merging
from data_pipeline.execution.buckets import SPLITS
from data_pipeline.execution.inputs import InputFile, list_files, shared
from data_pipeline.execution.merging import level_name
from data_pipeline.execution.workers import are_small
from data_pipeline.foundation import memory
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.progress import counted
from data_pipeline.report import Json
from data_pipeline.stages import evaluation_sets, sampling
from data_pipeline.stages.tokens import token_dtype
from data_pipeline.tokenizer.training import MEMORY_PER_BYTE

_RAY_START = 9.0  # seconds, with the first worker; measured on two cores
_STAGE_START = 0.5  # seconds between stages, and for each round of units
_WORKER_MEMORY = 0.35e9  # bytes of a worker that has read nothing
_GROUP_MEMORY = 0.1e9  # bytes of a row group of documents, read and written
# bytes in a bucket
_KEY_MEMORY = {"urls": 120, "lines": 70, "spans": 70, "anchors": 60, "substrings": 90, "documents": 80, "minhash": 80}
# of 8 bytes in a key
_WORDS = {"urls": 6, "lines": 3, "spans": 3, "anchors": 2, "substrings": 4, "documents": 3, "minhash": 2}
_NEAR_DUPLICATES, _MEMORY_IN_PAIRS = 0.2, 160  # the share of documents that have any; bytes for each of them
_BYTES_PER_SPAN = 100  # of text, for each sentence
_BYTES_PER_WORD = 6  # of text
_REPEATED = 0.1  # the share of a text that is expected to occur twice, where nothing was measured
_BYTES_PER_SUBSTRING = 32  # of a key, as it is written
_NGRAM_MEMORY = 10  # bytes for each byte of an evaluation set
_GROWTH_OF_PIECES = 0.13  # how much longer a piece gets when the vocabulary doubles; T5's 32,000 have 4.6 bytes
_MANY_OPENS = 10_000_000
_MERGING = 150e6  # bytes per second that are merged; measured with small files
_TRAINING, _READING = 0.5e6, 380e6  # bytes per core-second: a tokenizer is trained on English text; documents are read


@dataclass(frozen=True)
class StagePlan:
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
    stages: list[StagePlan]
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

    def __init__(self, report: Json, config: CorpusConfig):
        self._stages = {stage["name"]: stage for stage in report["stages"]}
        self._report, self._sources = report, report["sources"]
        missing = {source.name for source in config.sources} - set(self._sources)
        if missing or "tokens" not in self._stages:
            lacks = f"source {', '.join(sorted(missing))}" if missing else "the stages up to the shards"
            raise UserError(f"--speeds: the report lacks {lacks}; name a finished corpus with the same sources")

    def of(self, stage: str) -> float:
        """Bytes per core-second. A stage that wasn't measured counts as fast as reading and writing documents."""
        found = self._stages.get(stage) or self._stages.get("deduplicated") or self._stages["tokens"]
        return 1e6 * (found["megabytes_per_core_second"] or 1000.0)

    def measured(self, stage: str) -> bool:
        """Whether the report has the stage."""
        return stage in self._stages

    def written(self, stage: str) -> float:
        """Bytes written for each byte of input."""
        found = self._stages.get(stage)
        return found["written_megabytes"] / found["megabytes"] if found and found["megabytes"] else 0.0

    def text(self, source: str, key: str) -> float:
        """Bytes of text, before (`text_read_bytes`) or after deduplication, for each byte of a source."""
        own = self._sources[source]
        return own[key] / max(1, own["bytes"])

    @property
    def tokens_per_byte(self) -> float:
        left = sum(own["text_bytes"] for own in self._sources.values())
        return sum(split["tokens"] + split["dropped_tokens"] for split in self._report["splits"].values()) / max(
            1, left
        )

    def training(self, sample_bytes: float) -> float:
        """Core-seconds of the tokenizer's training.

        Much of it doesn't depend on the sample, so what a larger sample adds is taken from `_TRAINING`.
        """
        measured = self._report["tokenizer_sample"].get("bytes", 0)
        seconds = self._stages["tokenizer"]["core_seconds"] if measured else 0.0
        more = max(0.0, sample_bytes - measured) / _TRAINING
        return more + seconds * min(1.0, sample_bytes / max(1, measured))

    @property
    def pieces(self) -> int:
        return self._report["pieces"]

    @property
    def bytes_per_document(self) -> float:
        return self._text_read / max(1, self._report["documents"]["read"])

    @property
    def bytes_per_line(self) -> float:
        return self._text_read / max(1, self._report["lines"]["read"] or self._text_read / 100)

    @property
    def _text_read(self) -> float:
        return max(1, sum(own["text_read_bytes"] for own in self._sources.values()))


def forecast_build(config: CorpusConfig, report: Json, measured: str, workers: int | None = None) -> Forecast:
    """The forecast of a build by `workers` (all of this machine's cores by default) at the speeds of `report`.

    A build that is too small for a cluster has one worker.
    """
    speeds = _Speeds(report, config)
    files = [file for source in config.sources for file in list_files(source, output=Path(config.output))]
    small = are_small(sum(file.bytes for file in files), config.ray)
    workers = 1 if small else workers or config.ray.num_cpus or os.cpu_count() or 1
    stages, tokens = _stages(config, speeds, files, workers)
    warnings = list(_warnings(config, stages, files, workers))
    return Forecast(config.name, measured, workers, 0.0 if small else _RAY_START, len(files), stages, tokens, warnings)


def as_json(found: Forecast) -> dict[str, Any]:
    return {**asdict(found), "seconds": found.seconds, "disk": found.disk}


def as_text(found: Forecast) -> str:
    """The forecast in lines of 80 columns."""
    lines = [
        f"{found.name}: {found.inputs:,} inputs, {counted(found.workers, 'worker')}; speeds {found.measured}",
        f"{'stage':23}{'units':>7}{'MB':>10}{'core-s':>9}{'s':>7}{'worker':>9}{'disk':>9}{'opens':>6}",
    ]
    lines += [
        f"{stage.name:23}{stage.units:>7,}{_megabytes(stage.megabytes):>10}{stage.core_seconds:>9,.0f}"
        f"{stage.seconds:>7,.0f}{_size(stage.memory):>9}{_size(stage.disk):>9}{_short(stage.opens):>6}"
        for stage in found.stages
    ]
    tokens = ", ".join(f"{split} {count:,}" for split, count in found.tokens.items() if count)
    waiting = f", {found.ray_start:.0f} s of it for Ray to start" if found.ray_start else ""
    lines += [
        f"tokens: {tokens}",
        f"time: {_duration(found.seconds)}{waiting}; disk: {_size(found.disk)}",
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in found.warnings)])


def _stages(
    config: CorpusConfig, speeds: _Speeds, files: list[InputFile], workers: int
) -> tuple[list[StagePlan], dict[str, int]]:
    units = shared(files, config)
    sizes = [sum(file.bytes for file in unit) for unit in units]
    read, kept = (
        [size * speeds.text(unit[0].source.name, key) for size, unit in zip(sizes, units, strict=True)]
        for key in ("text_read_bytes", "text_bytes")
    )
    parts = sum(max(1, math.ceil(text / config.characters_per_part)) for text in read)
    largest_part = min(max(read), config.characters_per_part)
    pieces = config.tokenizer.vocab_size if config.tokenizer.path is None else speeds.pieces
    longer = 1 + _GROWTH_OF_PIECES * math.log2(max(1.0, pieces / max(1, speeds.pieces)))
    tokens_per_byte = speeds.tokens_per_byte / longer
    width = token_dtype(pieces + config.tokenizer.sentinels)().itemsize
    held_out = config.split.validation_fraction
    shares = dict(zip(SPLITS, (1 - held_out, held_out), strict=True))
    tokens = {split: round(share * sum(kept) * tokens_per_byte) for split, share in shares.items()}
    shards = sum(config.buckets(count) for count in tokens.values() if count)

    def stage(
        name: str, units: int, size: float, largest: float, worker: float, opens: int, written: float | None = None
    ) -> StagePlan:
        core_seconds = size / speeds.of(name)
        wall = max(core_seconds / min(workers, units), largest / speeds.of(name)) + _STAGE_START
        disk = size * speeds.written(name) if written is None else written
        return StagePlan(name, units, size / 1e6, core_seconds, wall, _WORKER_MEMORY + worker, disk, opens)

    ranges = [_ranges(unit[0], config.bytes_per_unit) if len(unit) == 1 else 1 for unit in units]
    largest = max(size / count for size, count in zip(sizes, ranges, strict=True))
    opens = 2 * (len(files) - len(units) + sum(ranges)) + parts
    found = [stage("documents", sum(ranges), sum(sizes), largest, _GROUP_MEMORY, opens)]

    def merged(of: str, files: int, readers: int, written: float, size: float) -> int:
        """Adds the levels at which the `files` of the stage `of`, `written` bytes, are merged; returns how many are
        left."""
        for level, group in enumerate(merging.group_sizes(files, readers), 1):
            name, units = level_name(of, level), -(-files // group)
            seconds = size / speeds.of(name) if speeds.measured(name) else written / _MERGING
            wall = seconds / min(workers, units) + _STAGE_START
            worker = _WORKER_MEMORY + _GROUP_MEMORY
            found.append(StagePlan(name, units, size / 1e6, seconds, wall, worker, written, files + units))
            files = units
        return files

    losers = anchors = 0  # files of the steps so far, which each part reads
    text = sum(read)
    for step in config.steps:
        if step == "filters":
            found.append(stage("page-filters", parts, text, largest_part, _GROUP_MEMORY, parts * (2 + losers)))
            continue
        if step == "decontamination":
            size = float(evaluation_sets.plan(config.decontamination)[0].bytes)
            worker = _NGRAM_MEMORY * size
            found.append(stage("evaluation-sets", 1, size, size, 3 * worker, 2))
            worker += _GROUP_MEMORY
            found.append(stage("decontamination", parts, text, largest_part, worker, parts * (3 + losers)))
            continue
        keys = _keys(step, config, text, speeds)
        if step != "urls":
            worker = _GROUP_MEMORY + 2 * _KEY_MEMORY[step] * keys * largest_part / text
            found.append(stage(f"{step}-keys", parts, text, largest_part, worker, parts * (2 + losers)))
        own = KeyBucket.enough(round(keys), config.dedup.keys_per_bucket)
        to_read = merged(f"{step}-keys", parts, own, keys * (8 * _WORDS[step] + 4), text)
        worker = _KEY_MEMORY[step] * min(keys / own, 2 * config.dedup.keys_per_bucket)
        found.append(stage(f"{step}-losers", own, text, text / own, worker, own * (to_read + 1)))
        if step == "minhash":
            in_pairs = _NEAR_DUPLICATES * text / speeds.bytes_per_document
            found.append(stage("minhash-clusters", 1, text, text, _MEMORY_IN_PAIRS * in_pairs, to_read + own))
            losers += 1
            continue
        decided = merged(f"{step}-losers", own, parts, text * speeds.written(f"{step}-losers"), text)
        losers += decided
        if step == "anchors":
            anchors = decided
        elif step == "substrings":  # no later step reads what anchors decided
            losers -= anchors
    if config.steps:
        found.append(stage("deduplicated", parts, text, largest_part, _GROUP_MEMORY, parts * (2 + losers)))
    found += _tokenizer(config, speeds, sum(kept), parts, workers)
    worker = _GROUP_MEMORY + 3 * largest_part * tokens_per_byte * width
    written = 1.1 * width * sum(tokens.values())
    found.append(stage("tokens", parts, sum(kept), largest_part, worker, 2 * parts, written))
    to_read = merged("tokens", parts, shards, written, sum(kept))
    worker = 4 * width * min(config.tokens_per_shard, sum(tokens.values()))
    if config.rows.packing != "concatenate":
        found.append(stage("rows", shards, sum(kept), sum(kept) / shards, worker, shards * (to_read + 1), 0.0))
    written = 1.02 * width * sum(tokens.values())
    found.append(stage("shards", shards, sum(kept), sum(kept) / shards, worker, shards * (to_read + 1), written))
    return found, tokens


def _tokenizer(config: CorpusConfig, speeds: _Speeds, text: float, parts: int, workers: int) -> list[StagePlan]:
    """Trains on a sample of all documents, on one core, or copies a tokenizer. Of many, workers choose candidates."""
    if config.tokenizer.path is not None:
        return [StagePlan("tokenizer", 1, 0.0, 0.0, _STAGE_START, _WORKER_MEMORY, 0.0, 2)]
    sample = min(text, config.tokenizer.sample_bytes)
    reading, training, files = text / _READING, speeds.training(sample), parts
    stages = []
    if sampling.is_large(config.tokenizer, text, text / speeds.bytes_per_document):
        files = min(parts, sampling.units_of(text))
        seconds = reading / min(workers, files) + _STAGE_START
        memory, opens = _WORKER_MEMORY + _GROUP_MEMORY, parts + files
        stages = [StagePlan(sampling.STAGE.name, files, text / 1e6, reading, seconds, memory, 2 * sample, opens)]
        reading = 0.0
    seconds, worker = training + reading, _WORKER_MEMORY + MEMORY_PER_BYTE * sample
    return [*stages, StagePlan("tokenizer", 1, text / 1e6, seconds, seconds + _STAGE_START, worker, 1e6, files)]


def _ranges(file: InputFile, bytes_per_unit: int) -> int:
    """The units that read one input. A dump of many streams is cut when the build starts; its name tells."""
    many = file.source.format == "wikipedia" and "multistream" in file.name
    return max(1, math.ceil(file.bytes / bytes_per_unit)) if many else 1


def _keys(step: str, config: CorpusConfig, text: float, speeds: _Speeds) -> float:
    documents = text / speeds.bytes_per_document
    if step == "lines":
        return text / speeds.bytes_per_line
    if step == "spans":
        return text / _BYTES_PER_SPAN
    if step == "anchors" and config.dedup.substrings:
        length = config.dedup.substrings.words
        return 2 * text / _BYTES_PER_WORD / (length - length // 2 + 2)
    if step == "substrings":
        return text * (speeds.written("substrings-keys") / _BYTES_PER_SUBSTRING or _REPEATED / _BYTES_PER_WORD)
    if step == "minhash" and config.dedup.minhash:
        return documents * shape(config.dedup.minhash)[0]
    return documents


def _warnings(config: CorpusConfig, stages: list[StagePlan], files: list[InputFile], workers: int) -> Iterator[str]:
    free = memory.available()
    there = next(
        path for path in (Path(config.output).absolute(), *Path(config.output).absolute().parents) if path.exists()
    )
    disk, needed = shutil.disk_usage(there).free, sum(stage.disk for stage in stages)
    if needed > disk:
        yield f"output: the build writes {_size(needed)}, and {_size(disk)} are free in {there}"
    for stage in stages:
        at_once = min(workers, stage.units) * stage.memory
        if at_once > free:
            many = f"{min(workers, stage.units):,} workers take" if stage.units > 1 else "takes"
            way_out = "tokenizer.sample_bytes" if stage.name == "tokenizer" else "ray.num_cpus"
            yield f"{stage.name}: {many} {_size(at_once)} of memory, and {_size(free)} are free here; lower {way_out}"
        if stage.opens > _MANY_OPENS:
            yield f"{stage.name}: opens {stage.opens:,} files: {_duration(stage.opens * 1e-3 / workers)} at 1 ms each"
    largest = max(files, key=lambda file: file.bytes)
    total = sum(file.bytes for file in files)
    if len(files) > 1 and largest.bytes > 2 * total / workers and _ranges(largest, config.bytes_per_unit) == 1:
        yield f"{largest.name}: one worker reads its {_size(largest.bytes)} alone, while the others wait"


def _size(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size / 1e3:,.0f} kB"


def _megabytes(size: float) -> str:
    return f"{size:,.1f}" if size < 10_000 else f"{size:,.0f}"


def _short(count: int) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e4)):
        if count >= scale:
            return f"{count / (1e6 if unit == 'M' else 1e3):,.0f}{unit}"
    return f"{count:,}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
