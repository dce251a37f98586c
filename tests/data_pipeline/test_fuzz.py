"""A short form of `python -m tests.fuzz`."""

from tests.fuzz import check


def test_damaged_input_crashes_no_reader_and_is_never_lost_silently():
    for number in range(3000):
        check(1, number)
