"""Files of dedup keys and of duplicates: which copy is kept, and what merged files hold."""

import numpy as np

from data_pipeline.base.local_store import LocalStore
from data_pipeline.dedup import keys
from data_pipeline.dedup.keys import KeyBucket, Keys
from data_pipeline.engine import merging
from data_pipeline.engine.context import Context
from tests.support.tables import each


@each("words, group", [(2, 1), (3, 1), (3, 2), (4, 2)])
def test_the_smallest_by_order_unit_and_position_is_kept_of_rows_with_equal_groups(words, group):
    chance = np.random.default_rng(words + group)
    table = chance.integers(0, 5, (300, words), np.uint64)
    table[:, -1] = np.arange(300)  # the position
    units = chance.integers(0, 3, 300, np.uint64)
    best: dict[tuple[int, ...], tuple[int, ...]] = {}
    for number, row in enumerate(table.tolist()):
        place = (*row[group:-1], int(units[number]), row[-1])
        best[tuple(row[:group])] = min(best.get(tuple(row[:group]), place), place)
    kept, duplicates, copies = keys.decide(table, group, units)
    assert [(tuple(row[:group]), row[-1]) for row in table[kept].tolist()] == [
        (own, best[own][-1]) for own in sorted(best)
    ]
    assert sorted([*kept.tolist(), *duplicates.tolist()]) == list(range(300))
    for row, copy in zip(table[duplicates].tolist(), table[copies].tolist(), strict=True):
        assert copy[-1] == best[tuple(row[:group])][-1]


def test_keys_of_merged_files_are_those_of_the_files(tmp_path, monkeypatch):
    """The first of the files is that of unit 0. No bucket of a merge holds more than 32 keys on average."""
    monkeypatch.setattr(keys, "_KEYS_AT_ONCE", 32)
    chance, store = np.random.default_rng(5), LocalStore(tmp_path)
    for unit, number in enumerate((0, 40, 1, 90)):
        own = Keys(group=2, order=1)
        for document, words in enumerate(chance.integers(0, 2**64, (number, 3), np.uint64).tolist()):
            own.add(document, 0, words)
        own.write(tmp_path / str(unit), slots=64)
    files = [str(unit) for unit in range(4)]
    keys.merge_keys(Context(store), merging.MergeSpec(tuple(files), 0, "merged"))
    for bucket in [KeyBucket(number, count) for count in (1, 4, 64) for number in range(count)]:
        found, wanted = (bucket.read(store, names) for names in (["merged"], files))
        rows = [sorted(np.column_stack([units, table]).tolist()) for table, units in (found, wanted)]
        assert rows[0] == rows[1]
    assert len(KeyBucket(0, 1).read(store, ["merged"])[0]) == 131


@each("at_once", [1, 60, 10**6])
def test_duplicates_of_merged_files_are_those_of_the_files(tmp_path, monkeypatch, at_once):
    """Duplicates of one unit at a time, of two, and of all."""
    monkeypatch.setattr(keys, "_DUPLICATES_AT_ONCE", at_once)
    chance, files = np.random.default_rng(7), []
    for number in (0, 40, 1, 90, 30):
        files.append(f"{len(files)}.safetensors")
        units, places = (chance.integers(0, most, number, np.uint64) for most in (6, 2**40))
        keys.write_duplicates(tmp_path / files[-1], units, places, 7)
    keys.merge_duplicates(Context(LocalStore(tmp_path)), merging.MergeSpec(tuple(files), 0, "merged.safetensors"))
    for unit in range(7):
        merged = keys.read_duplicates(LocalStore(tmp_path), None, ["merged.safetensors"], unit)
        assert merged == keys.read_duplicates(LocalStore(tmp_path), None, files, unit)


def test_a_document_that_stays_in_the_place_of_a_duplicate_is_no_duplicate_itself(tmp_path):
    """In unit 2, documents 3 and 5 are equal to document 1, which stays, and document 4 to document 2, which is a
    duplicate of document 9 of unit 0."""
    own, store = Keys(group=1, order=0), LocalStore(tmp_path)
    for document, group in {1: 10, 2: 20, 3: 10, 4: 20, 5: 10}.items():
        own.add(document, 0, [group])
    own.write(tmp_path / "keys", slots=8)
    of_another = np.array([2], np.uint64), np.array([2 << 32], np.uint64), 3, np.array([9], np.uint64)
    keys.write_duplicates(tmp_path / "decided", *of_another)
    found = keys.read_duplicates(store, "keys", ["decided"], unit=2, kept=True)
    assert found.items == {document: [0] for document in (2, 3, 4, 5)}
    assert found.kept == {2: 9, 3: 2 << 32 | 1, 4: 9, 5: 2 << 32 | 1}
