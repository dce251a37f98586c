"""The units of deduplication that compare keys: buckets of hashes, the clusters of pairs, and merged files."""

from dataclasses import dataclass

import numpy as np

from data_pipeline.dedup.config import STEPS, DedupConfig, step_of
from data_pipeline.dedup.keys import KeyBucket, merge_duplicates, pairs_within, write_duplicates
from data_pipeline.dedup.minhash import MEMORY_PER_DOCUMENT, Clusters
from data_pipeline.execution.merging import MergeSpec, read_names
from data_pipeline.execution.work_units import Result
from data_pipeline.foundation.safetensors_file import Arrays
from data_pipeline.foundation.store import Store
from data_pipeline.stages.stage import DUPLICATES, KEYS, Amounts, Stage


@dataclass(frozen=True)
class BucketSpec:
    """A bucket of all keys of a step. `files` lists the files of keys of all `units` (`write_names`), merged or not."""

    files: str
    units: int
    bucket: KeyBucket
    step: str
    dedup: DedupConfig
    output: str


@dataclass(frozen=True)
class ClustersSpec:
    """`files` lists the files of keys of all `units` (`write_names`); `pairs` are the files of the buckets."""

    files: str
    units: int
    pairs: list[str]
    output: str


def decide_bucket(corpus: Store, spec: BucketSpec) -> Result:
    """Decides which documents, lines or spans with keys in one bucket are dropped."""
    table, units = spec.bucket.read(corpus, read_names(corpus, spec.files))
    with corpus.put(spec.output) as path:
        step_of(spec.step, spec.dedup).decide(table, units, path, spec.units)
    return Result()


def find_clusters(corpus: Store, spec: ClustersSpec) -> Result:
    """Finds the connected components of all pairs, and drops all but the smallest id of each."""
    clusters = Clusters()
    for name in spec.pairs:
        clusters.join(Arrays(corpus, name)["pairs"])
    for pairs in pairs_within(corpus, read_names(corpus, spec.files)):
        clusters.join(pairs)
    documents, first = clusters.members()
    duplicates = documents[documents != first]
    places = (duplicates & np.uint64(2**32 - 1)) << np.uint64(32)
    with corpus.put(spec.output) as path:
        write_duplicates(path, duplicates >> np.uint64(32), places, spec.units)
    return Result()


def merge_keys(corpus: Store, spec: MergeSpec) -> Result:
    KeyBucket.merge(corpus, spec.files, spec.first, spec.output)
    return Result()


def merge_signatures(corpus: Store, spec: MergeSpec) -> Result:
    """Like `merge_keys`, with the near-duplicates within a unit, which the clusters need too."""
    KeyBucket.merge(corpus, spec.files, spec.first, spec.output, with_pairs=True)
    return Result()


def merge_decided(corpus: Store, spec: MergeSpec) -> Result:
    merge_duplicates(corpus, spec.files, spec.output)
    return Result()


def buckets_for(amounts: Amounts, step: str) -> int:
    return KeyBucket.enough(amounts.keys[step], amounts.config.dedup.keys_per_bucket)


def buckets_of(step: str) -> Stage[BucketSpec, Result]:
    clusters = STEPS[step].clusters
    return Stage(
        f"{step}-duplicates",
        1,
        decide_bucket,
        "lower dedup.keys_per_bucket",
        memory=120,  # of any step
        unit="a bucket of hashes",
        reads=(KEYS,),
        writes=DUPLICATES,
        units=lambda amounts: buckets_for(amounts, step),
        most=lambda amounts: amounts.keys[step] // buckets_for(amounts, step),
        sized_by="key of a bucket",
        applies=lambda config: step in config.steps,
        step=step,
        of_urls=STEPS[step].compares_dropped_pages,
        merge=None if clusters else merge_decided,
        readers=lambda amounts: len(amounts.groups),
    )


def clusters_of(step: str) -> Stage[ClustersSpec, Result]:
    return Stage(
        f"{step}-clusters",
        2,
        find_clusters,
        "raise dedup.minhash.rows",
        memory=MEMORY_PER_DOCUMENT,
        unit="all pairs",
        reads=(KEYS, DUPLICATES),
        writes=DUPLICATES,
        units=lambda amounts: 1,
        most=lambda amounts: amounts.documents,
        sized_by="document, if each has near-duplicates",
        applies=lambda config: step in config.steps,
        step=step,
    )
