"""A short form of `python -m checks.fuzz`, and cases that once found bugs."""

from checks.fuzz import check, seeds
from data_pipeline.sources.formats import READERS


def test_damaged_input_crashes_no_reader_and_is_never_lost_silently():
    for seed, number in [(7, 619), (7, 31856), *((1, number) for number in range(500))]:
        check(seed, number)


def test_each_reader_is_given_damaged_files():
    tables = {"arrow", "csv"}  # read as Parquet is; their damage is that of test_table_sources.py
    assert {seed.format for seed in seeds()} == {*READERS} - tables
