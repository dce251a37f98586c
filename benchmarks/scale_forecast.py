"""How long would 100 nodes take for C4 from one snapshot of Common Crawl? Arithmetic from what one machine has shown.

    python benchmarks/scale_forecast.py measure [--save]   # each stage on one core
    python benchmarks/scale_forecast.py                                  # the table

`measure` builds configs/corpora/c4.yaml in this process from WET files of the published C4's first records, with their
words in another order in each copy. `--save` puts the rows into docs/results/scale/one-core.csv.
"""

import csv
import gzip
import json
import math
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scale_rows
from wet_files import write_wet

from data_pipeline.base.config_file import load
from data_pipeline.base.json_file import read_json
from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.keys import KeyBucket
from data_pipeline.engine import merging
from data_pipeline.engine.workers import without_ray
from data_pipeline.stages import report
from data_pipeline.stages.parts import Part, grouped
from data_pipeline.stages.pipeline import build
from data_pipeline.stages.tokenizer import plan_sampling

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/corpora/c4.yaml"
SAMPLE = ROOT / "data_pipeline/samples/c4-train.00000-of-01024-first1000.json.gz"
FILES, COPIES = 8, 24  # copies of the 2 MB of C4's first records
WORKERS = 6400  # of 100 nodes
_BYTES_OF_A_URL, _BYTES_OF_A_KEY, _BYTES_OF_A_TOKEN = 100, 24, 2
_READING = 10e9  # bytes a second of a file system
_SMALL = {"inputs": "1000", "workers": "1", "what": "build"}
_MANY = "25600"  # units in flight


@dataclass(frozen=True)
class Crawl:
    """One snapshot, in bytes: of its WET files as stored and unpacked, of what cleaning leaves before it looks at
    languages, and of what is kept in the end."""

    files: int = 72_000
    stored: float = 7.9e12
    text: float = 20e12
    read: float = 806e9 * 700 / 223  # docs/results/corpus.md: 223 of 700 kB are in English and without bad words
    kept: float = 806e9
    documents: int = 365_000_000
    tokens: int = 156_000_000_000


@dataclass(frozen=True)
class Speeds:
    """`cleaning`: MB a core-second of a crawl's text, read and cleaned; `stages`: of the text that each stage reads.

    `keys`: per MB of that text, by stage; `stored`: the share of a text's bytes that Parquet takes. `units_per_second`:
    of the driver with 25,600 in flight. `fixed`: seconds of a unit of a few kB.
    """

    cleaning: float
    stages: Mapping[str, float]
    keys: Mapping[str, float]
    stored: float
    units_per_second: float
    fixed: float


@dataclass(frozen=True)
class StageTime:
    """`unit`: seconds of a unit; `work`: of the workers, which take units in turns; `driver`: to hand them out.
    `reads`: bytes from the file system."""

    name: str
    units: int
    unit: float
    work: float
    driver: float
    reads: float

    @property
    def seconds(self) -> float:
        return max(self.work, self.driver)

    def seconds_at(self, speed: float) -> float:
        """With a file system of `speed` bytes a second."""
        return max(self.seconds, self.reads / speed)


def stage_time(
    name: str, units: int, core_seconds: float, read: float, workers: int, per_second: float, fixed: float = 0.0
) -> StageTime:
    """A stage whose `units`, equally large, take `core_seconds` in all and `fixed` more each, and read `read` bytes."""
    unit = core_seconds / units + fixed
    return StageTime(name, units, unit, math.ceil(units / workers) * unit, units / per_second, read)


def forecast(
    config: CorpusConfig, crawl: Crawl, speeds: Speeds, workers: int, opens: int = LocalStore.most_opens
) -> Iterator[StageTime]:
    """Each stage of C4's build. Units are counted by the functions that plan them. `opens`: the store's."""

    def times(name: str, units: int, text: float, read: float | None = None, stage: str = "") -> StageTime:
        """`stage`: the one whose speed is meant."""
        core_seconds = text / 1e6 / speeds.stages[stage or name]
        read = text * speeds.stored if read is None else read
        return stage_time(name, units, core_seconds, read, workers, speeds.units_per_second, speeds.fixed)

    cleaned = crawl.text / 1e6 / speeds.cleaning
    of_workers = workers, speeds.units_per_second, speeds.fixed
    yield stage_time("documents", crawl.files, cleaned, crawl.stored, *of_workers)
    per_file = round(crawl.read / crawl.files)
    read = grouped([_part(per_file, crawl.documents / crawl.files)] * crawl.files, config)
    for step in ("urls", "lines", "documents"):
        keys = round(speeds.keys[f"{step}-keys"] * crawl.read / 1e6)
        buckets, of_keys = KeyBucket.enough(keys, config.dedup.keys_per_bucket), _BYTES_OF_A_KEY * keys
        yield times(f"{step}-keys", len(read), crawl.read, _BYTES_OF_A_URL * keys if step == "urls" else None)
        if units := merging_units(len(read), buckets, opens):
            yield times(f"{step}-keys-merged", units, crawl.read, of_keys, f"{step}-duplicates")
        yield times(f"{step}-duplicates", buckets, crawl.read, of_keys)
        if units := merging_units(buckets, len(read), opens):
            yield times(f"{step}-duplicates-merged", units, crawl.read, 0.0, f"{step}-duplicates")
    yield times("deduplicated", len(read), crawl.read)
    kept = [_part(round(crawl.kept / len(read)), crawl.documents / len(read))] * len(read)
    yield times("tokenizer-sample", len(plan_sampling(config.tokenizer, config.seed, kept)), crawl.kept)
    sample = config.tokenizer.trained_on(int(crawl.kept))
    trained = sample / 1e6 / speeds.stages["tokenizer"]  # as if it had one thread
    yield stage_time("tokenizer", 1, trained, sample, 1, speeds.units_per_second)
    groups, buckets = len(grouped(kept, config)), config.buckets(crawl.tokens)
    yield times("tokens", groups, crawl.kept)
    if units := merging_units(groups, buckets, opens):
        yield times("tokens-merged", units, crawl.kept, _BYTES_OF_A_TOKEN * crawl.tokens, "shards")
    yield times("shards", buckets, crawl.kept, _BYTES_OF_A_TOKEN * crawl.tokens)


def merging_units(files: int, readers: int, opens: int) -> int:
    """How many units merge `files`; 0 if they aren't merged."""
    return len(merging.plan("", {str(number): "" for number in range(files)}, readers, opens))


def _part(size: int, documents: float) -> Part:
    return Part("", "wet", "", size, {"train": round(documents)}, characters=size, checksums=[])


def speeds_of(folder: Path) -> Speeds:
    """What docs/results, `folder`, has measured."""
    (table,) = read_json(folder / "corpus/cleaning-speed.json", dict[str, Any])["tables"]
    steps = {row[0]: one["rate"] for row, one in zip(table["rows"], table["data"], strict=True)}
    cleaning = 1 / (1 / steps["read wet"] + 1 / steps["C4's lines and pages"])
    one_core = {row["stage"]: row for row in _rows(folder / "scale/one-core.csv")}
    enwik8 = read_json(folder / "corpus/enwik8-report.json", dict[str, Any])  # large enough for a stage that samples
    rates = {one["name"]: one["megabytes_per_core_second"] for one in enwik8["stages"]}
    sampling = {"tokenizer-sample": rates["tokenizer-sample"]}
    loop = [row for row in _rows(folder / "scale/loop.csv") if row["units in flight"] == _MANY]
    small = [row for row in _rows(folder / "scale/built.csv") if _SMALL.items() <= row.items()]
    return Speeds(
        cleaning,
        sampling | {name: float(row["MB a core-second"]) for name, row in one_core.items()},
        {name: float(row["keys"]) / float(row["MB"]) for name, row in one_core.items() if row["keys"]},
        float(one_core["documents"]["written MB"]) / float(one_core["lines-keys"]["MB"]),
        float(loop[-1]["units a second"]),
        float(small[-1]["seconds"]) / int(small[-1]["units"]),
    )


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def measure() -> Iterator[scale_rows.Row]:
    """A row for each stage of a build by one core."""
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    with tempfile.TemporaryDirectory() as name:
        (inputs := Path(name) / "inputs").mkdir()
        for number in range(FILES):
            copies = range(number, COPIES, FILES)
            pages = [(f"{one['url']}?{copy}", _shuffled(one["text"], copy)) for copy in copies for one in records]
            write_wet(inputs / f"{number}.warc.wet.gz", pages)
        sources = json.dumps([{"format": "wet", "path": str(inputs)}])
        overrides = [f"output={name}/corpus", f"sources={sources}", "bytes_per_shared_unit=0"]
        overrides += ["tokenizer.vocab_size=16000"]  # the records have no words for more
        with without_ray():
            found = report.read(build(load(CONFIG, overrides, CorpusConfig)))
    for stage in found.stages:
        size = stage.megabytes
        if stage.name == "tokenizer" and found.tokenizer_sample:
            size = found.tokenizer_sample.bytes / 1e6
        rate = stage.megabytes_per_core_second and stage.megabytes_per_core_second * size / stage.megabytes
        row = {"stage": stage.name, "MB": round(size, 3), "core-seconds": stage.core_seconds}
        row |= {"MB a core-second": rate and round(rate, 2), "written MB": stage.written_megabytes}
        yield row | {"keys": "" if stage.keys is None else stage.keys}


def _shuffled(text: str, copy: int) -> str:
    """The text with the words of each line but the last in another order."""
    chance = random.Random(copy)
    lines = []
    for line in text.splitlines():
        *words, last = line.split() or [""]
        chance.shuffle(words)
        lines.append(" ".join([*words, last]))
    return "\n".join(lines)


def cells(folder: Path) -> list[list[str]]:
    """The table of docs/results, `folder`: a row for each stage, and one for all."""
    found = [*forecast(load(CONFIG, [], CorpusConfig), Crawl(), speeds_of(folder), WORKERS)]
    rows = []
    for one in found:
        figures = [f"{one.unit:.1f}", f"{one.reads / 1e12:.2f}", *(f"{seconds:.0f}" for seconds in _times(one))]
        rows.append([f"`{one.name}`", f"{one.units:,}", *figures])
    read = f"{sum(one.reads for one in found) / 1e12:.2f}"
    sums = (f"{sum(seconds):.0f}" for seconds in zip(*map(_times, found), strict=True))
    return [*rows, ["**all**", f"{sum(one.units for one in found):,}", "", read, *sums]]


def _times(one: StageTime) -> tuple[float, ...]:
    return one.work, one.driver, one.seconds, one.seconds_at(_READING)


if __name__ == "__main__":
    scale_rows.forecast_or_measure(__doc__, cells, "one-core.csv", measure, ["stage"])
