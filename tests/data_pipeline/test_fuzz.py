"""A short form of `python -m checks.fuzz`, and cases that once found bugs."""

from checks.fuzz import check


def test_damaged_input_crashes_no_reader_and_is_never_lost_silently():
    for seed, number in [(7, 619), (7, 31856), *((1, number) for number in range(500))]:
        check(seed, number)
