"""How many requests does a build in a bucket send to read files, and how many would C4 take?

    python benchmarks/bucket_requests.py measure [--save]   # of a small build, counted by a proxy before its server
    python benchmarks/bucket_requests.py                    # of C4, by arithmetic

`measure` builds 8 MB of text in 24 inputs, in a bucket on a SeaweedFS (as object_storage.py). Stages have as many units
as inputs, and merge files above 60 opens, so that keys, duplicates and tokens are merged as those of a large corpus.
`--save` puts the rows into docs/results/scale/bucket-requests.csv.

The arithmetic has C4 from one snapshot, as scale_forecast.py. A request is a GET or a HEAD. A file of arrays takes one
for its header, and one for each slice that isn't read with the header. A Parquet file takes one if it is small; else
one for its size, one for its footer, and one for each piece. A unit looks for its driver's claim with two requests, and
with two more at its end if it takes longer than 3 s.
"""

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import object_storage
import scale_forecast
import scale_rows
from scale_forecast import Crawl, Speeds, merging_units

from data_pipeline.base import object_store, stores
from data_pipeline.base.config_file import load
from data_pipeline.base.object_store import ObjectStore
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup import keys
from data_pipeline.engine.merging import group_size, untouched
from data_pipeline.engine.workers import without_ray
from data_pipeline.stages import tokens
from data_pipeline.stages.pipeline import build

INPUTS, OPENS = 24, 60  # of `measure`
A_SECOND = 5500  # requests of one prefix that S3 answers


@dataclass(frozen=True)
class Code:
    """How a version of the code reads from a bucket.

    Attributes:
        opens: the number above which files are merged.
        whole: bytes of a file of documents that are requested at once.
        ahead: bytes of an input that are requested at once.
        keys_at_once, tokens_at_once: how many are merged in memory.
        keys: requests for a bucket's slice of a merged file of keys.
        merged: requests for a file of keys that is merged: first, and for each range.
        duplicates: requests for a unit's slice of a file of duplicates, without and with the documents that stay.
        tokens: requests for a shard's slice of a file of tokens.
        index: requests of the driver for the index of a file of tokens.
    """

    opens: int
    whole: int
    ahead: int
    keys_at_once: int
    tokens_at_once: int
    keys: int
    merged: tuple[int, int]
    duplicates: tuple[int, int]
    tokens: int
    index: int

    def parquet(self, size: float) -> int:
        """Requests for a file of `size` bytes that is read from start to end."""
        return 1 if size < self.whole else 2 + math.ceil(size / self.whole)

    def left(self, files: int, readers: int) -> tuple[int, int, int]:
        """How many files are read after merging, how many are merged, and how many into one."""
        size = group_size(files, readers, self.opens)
        if size <= 1:
            return files, 0, 0
        apart = untouched(files, readers, self.opens, size)
        return apart + merging_units(files, readers, self.opens), files - apart, size


BEFORE = Code(10**6, 4 << 20, 4 << 20, 1 << 20, 1 << 24, 5, (2, 3), (3, 4), 4, 5)  # commit c8d8baf8
NOW = Code(
    ObjectStore.most_opens,
    object_store.READ_AHEAD,
    stores.READ_AHEAD,
    keys._KEYS_AT_ONCE,
    tokens._BYTES_AT_ONCE // 2,
    2,
    (1, 1),
    (2, 2),
    3,
    3,
)


Row = tuple[str, int, int, float]


def requests(config: CorpusConfig, crawl: Crawl, speeds: Speeds, code: Code) -> Iterator[Row]:
    """(stage, number of units, requests, seconds) of C4's build. A stage reads what the stages before it have written.

    The seconds are those of the workers or of the requests, whichever are more.
    """
    stages = {
        one.name: one for one in scale_forecast.forecast(config, crawl, speeds, scale_forecast.WORKERS, code.opens)
    }
    part = code.parquet(speeds.stored * crawl.read / crawl.files)
    units = stages["deduplicated"].units

    def all_of(name: str, asked: float) -> Row:
        """`asked`: without those for the claim and for the list of files, which a worker reads once."""
        one = stages[name]
        looks = 2 * one.units * (1 + (one.unit > object_store.LEASE_SECONDS / 10))
        asked += looks + min(one.units, scale_forecast.WORKERS)
        return name, one.units, round(asked), max(one.seconds, asked / A_SECOND)

    yield all_of("documents", crawl.files * (2 + 1 + math.ceil(crawl.stored / crawl.files / code.ahead)))
    decided = 0  # requests of all units for what the last step has decided, and for what earlier steps have changed
    for number, step in enumerate(("urls", "lines", "documents")):
        of_pages = crawl.files if step == "urls" else 0  # the URLs of dropped pages, a small file for each part
        yield all_of(f"{step}-keys", crawl.files * part + of_pages + decided)
        count, buckets = speeds.keys[f"{step}-keys"] * crawl.read / 1e6, stages[f"{step}-duplicates"].units
        files, merged, size = code.left(units, buckets)
        if merged:
            ranges = 2 ** math.ceil(math.log2(max(1.0, size * count / units / code.keys_at_once)))
            yield all_of(f"{step}-keys-merged", merged * (code.merged[0] + ranges * code.merged[1]))
        yield all_of(f"{step}-duplicates", buckets * files * code.keys)
        files, merged, size = code.left(buckets, units)
        names_kept = step != "lines"
        if merged:
            yield all_of(f"{step}-duplicates-merged", merged * code.duplicates[names_kept])
        decided = units * (files * code.duplicates[names_kept] + 2 + (number > 0))  # 2: of the unit's own file of keys
    yield all_of("deduplicated", crawl.files * part + decided)
    documents = units * code.parquet(speeds.stored * crawl.kept / units)
    yield all_of("tokenizer-sample", documents)
    yield all_of("tokens", documents)
    groups, buckets = stages["tokens"].units, stages["shards"].units
    files, merged, size = code.left(groups, buckets)
    if merged:
        ranges = math.ceil(size * crawl.tokens / groups / code.tokens_at_once)
        yield all_of("tokens-merged", merged * (1 + ranges * (code.tokens - 1)))
    yield all_of("shards", buckets * files * code.tokens + files * code.index)


def cells(folder: Path) -> list[list[str]]:
    """The table of docs/results, `folder`: the units, requests and seconds of each stage, before and now."""
    config, speeds = load(scale_forecast.CONFIG, [], CorpusConfig), scale_forecast.speeds_of(folder)
    found = [{name: own for name, *own in requests(config, Crawl(), speeds, code)} for code in (BEFORE, NOW)]
    rows, totals = [], list[str]()
    for name in found[-1]:  # merges whatever was merged before
        figures = [one.get(name, (0, 0, 0.0)) for one in found]
        rows.append([f"`{name}`", *(text for figure in figures for text in map("{:,.0f}".format, figure))])
    for one in found:
        units, asked, seconds = map(sum, zip(*one.values(), strict=True))
        totals += [f"{units:,}", f"{asked:,}", f"{seconds:,.0f}"]
    return [*rows, ["**all**", *totals]]


def measure() -> Iterator[dict[str, object]]:
    """A row for each folder whose files are read."""
    os.environ |= object_storage.LOGIN
    with tempfile.TemporaryDirectory() as name:
        folder, object_storage.FILES = Path(name), INPUTS
        for one in ("inputs", "server"):
            (folder / one).mkdir()
        object_storage.write_inputs(folder / "inputs")
        object_storage.write_corpus_file(corpus_file := folder / "corpus.yaml", folder / "inputs")
        changes = ["dedup.keys_per_bucket=2000", "shards.rows_per_block=16", "shards.blocks_per_shard=8"]
        with object_storage.server(folder / "server") as url, object_storage.counting(url) as (proxy, asked):
            os.environ["AWS_ENDPOINT_URL"] = proxy
            with mock.patch.object(ObjectStore, "most_opens", OPENS), without_ray():
                build(load(corpus_file, ["output=s3://bucket/corpus", *changes], CorpusConfig))
    for (method, of), count in sorted(asked.items(), key=lambda one: -one[1]):
        if method in ("GET", "HEAD") and of.startswith("/bucket/corpus/"):
            yield {"code": "after", "files of": of.removeprefix("/bucket/corpus/"), "requests": count}


if __name__ == "__main__":
    scale_rows.forecast_or_measure(__doc__, cells, "bucket-requests.csv", measure, ["code", "files of"])
