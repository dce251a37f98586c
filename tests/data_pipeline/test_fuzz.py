"""A short form of `python -m tests.fuzz`, and cases that once found bugs."""

import pytest

from tests.fuzz import check


def test_damaged_input_crashes_no_reader_and_is_never_lost_silently():
    for number in range(500):
        check(1, number)


@pytest.mark.parametrize(("seed", "number"), [(7, 619), (7, 31856)])
def test_cases_that_once_failed(seed, number):
    check(seed, number)
