"""Files of tokens: the buckets of their hashes, also of merged files."""

import numpy as np
from safetensors.numpy import save_file

from data_pipeline.base.local_store import LocalStore
from data_pipeline.engine import merging
from data_pipeline.engine.context import Context
from data_pipeline.stages import tokens
from data_pipeline.stages.tokens import SPLITS, TokenBucket
from tests.support.tables import each


@each("count", [1, 3, 7, 4096, 4200])
def test_the_bounds_of_a_bucket_fall_into_it(count):
    for number in {0, 1, count // 2, count - 1} & set(range(count)):
        bounds = np.array(TokenBucket("train", number, count).bounds, np.uint64)
        assert tokens.bucket_numbers(bounds, count).tolist() == [number, number]


def test_buckets_of_merged_pairs_are_those_of_the_files(tmp_path, monkeypatch):
    """Those of other tokens and of keys are in the builds of engine/test_merging.py."""
    monkeypatch.setattr(tokens, "_BYTES_AT_ONCE", 100)
    chance, files = np.random.default_rng(3), []
    same = np.sort(chance.integers(0, 2**64, 6, np.uint64))  # hashes that files share: their order decides
    for number, documents in enumerate([12, 0, 30, 1, 7]):
        arrays = {}
        for split, count in zip(SPLITS, (documents, documents // 4), strict=True):
            hashes = np.sort(np.concatenate([chance.integers(0, 2**64, count, np.uint64), same[: count // 5]]))
            lengths = chance.integers(0, 9, len(hashes))
            ends, last = np.cumsum([0, *lengths]), np.uint64(2**64 - 1)
            index = [np.append(hashes, last), ends, np.append(lengths // 2, 0)]
            arrays[f"{split}.index"] = np.column_stack([column.astype(np.uint64) for column in index])
            arrays[f"{split}.tokens"] = chance.integers(0, 60_000, lengths.sum()).astype(np.uint16)
        files.append(f"{number}.safetensors")
        save_file(arrays, tmp_path / files[-1])
    tokens.merge_tokens(Context(LocalStore(tmp_path)), merging.MergeSpec(tuple(files), 0, "merged.safetensors"))
    for count in (1, 3, 8):
        all_buckets = [TokenBucket(split, number, count) for split in SPLITS for number in range(count)]
        merged, apart = ["merged.safetensors"], files
        counts = [len(tokens.read_bucket(LocalStore(tmp_path), apart, bucket).tokens) for bucket in all_buckets]
        for stored in (merged, apart):
            assert tokens.count_tokens(LocalStore(tmp_path), stored, all_buckets) == counts
        for bucket in all_buckets:
            found, wanted = (
                tokens.read_bucket(LocalStore(tmp_path), merged, bucket),
                tokens.read_bucket(LocalStore(tmp_path), apart, bucket),
            )
            for name in ("tokens", "starts", "targets"):
                assert getattr(found, name).tolist() == getattr(wanted, name).tolist()
