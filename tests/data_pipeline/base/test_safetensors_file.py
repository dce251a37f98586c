"""Slices of arrays, and how often their files are opened."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.base.errors import FailedError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.safetensors_file import Arrays, growing_arrays, write_arrays
from data_pipeline.dedup.keys import KeyBucket, Keys, read_duplicates, write_duplicates
from data_pipeline.stages.tokens import SPLITS, TokenBucket, read_bucket
from tests.support.tables import each


class Counting(LocalStore):
    """Counts how often a file is opened."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.opens = 0

    @contextlib.contextmanager
    def opened(self, name):
        self.opens += 1
        with super().opened(name) as read:
            yield read


def token_file(path: Path, documents: int) -> None:
    """A file whose index and tokens aren't in the bytes that are read first."""
    arrays = {}
    for split in SPLITS:
        hashes = np.linspace(0, 2**64 - 2**11, documents + 1).astype(np.uint64)
        arrays[f"{split}.index"] = np.column_stack([hashes, np.arange(documents + 1, dtype=np.uint64) * np.uint64(3)])
        arrays[f"{split}.tokens"] = np.arange(documents * 3, dtype=np.uint16)
    write_arrays(path, arrays)


def test_bucket_of_tokens_opens_each_file_once(tmp_path):
    names = [f"{number}.safetensors" for number in range(10)]
    for name in names:
        token_file(tmp_path / name, 20_000)
    store = Counting(tmp_path)
    found = read_bucket(store, names, TokenBucket("train", 1, 4))
    assert store.opens == len(names)
    assert len(found.tokens) == 10 * 5000 * 3


def test_bucket_of_keys_and_its_duplicates_open_each_file_once(tmp_path):
    names = [f"{number}.safetensors" for number in range(10)]
    chance = np.random.default_rng(1)
    for number, name in enumerate(names):
        keys = Keys(1, 0)
        for place, value in enumerate(chance.integers(0, 2**63, 5000).tolist()):
            keys.add(place, 0, (value,))
        keys.write(tmp_path / name, 4096)
        write_duplicates(
            tmp_path / f"d{number}", np.arange(10_000, dtype=np.uint64), np.zeros(10_000, np.uint64), 10_000
        )
    store = Counting(tmp_path)
    table, units = KeyBucket(1, 4).read(store, names)
    assert store.opens == len(names)
    assert len(table) == len(units)
    assert 20_000 < len(table) < 30_000  # half of all, of which the highest bit is 0
    store.opens = 0
    assert read_duplicates(store, None, [f"d{number}" for number in range(10)], 7).items == {0: [0]}
    assert store.opens == 10


def test_opened_arrays_are_those_of_the_file_and_damage_is_named(tmp_path):
    write_arrays(tmp_path / "a", {"x": np.arange(10_000)})
    store = Counting(tmp_path)
    with Arrays.opened(store, "a") as file:
        assert file.slices(("x", 9_990, 9_993))[0].tolist() == [9_990, 9_991, 9_992]
        assert file["x"].tolist() == list(range(10_000))
    assert store.opens == 1
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:50_000])
    with (
        Arrays.opened(store, "a") as file,
        pytest.raises(FailedError, match=f"^{tmp_path}/a: damaged: it ends at byte"),
    ):
        file.slices(("x", 9_990, 9_993))


@each("values", [3, 5])
def test_arrays_that_are_not_as_long_as_they_were_said_to_be_are_no_file(tmp_path, values):
    shapes, put = {"a": (np.int64, (4,))}, LocalStore(tmp_path).put("x")
    wrong = pytest.raises(ValueError, match=r"a: (fewer|more) values")
    with wrong, put as path, growing_arrays(path, shapes) as append:
        append("a", np.zeros(values, np.int64))
    assert list(tmp_path.iterdir()) == []
