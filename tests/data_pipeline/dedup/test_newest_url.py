"""The newest page of a URL, where timestamps are no dates."""

from data_pipeline.dedup.newest_url import NewestUrl
from tests.support.tables import each

TEXTS = [
    "",
    "a",
    "ab",
    "b",
    "last year",
    "last year, at the end",
    "last year, at the start",
    "last year, b",
    "yesterday",
]


def rank_of(timestamp: str) -> tuple[int, ...]:
    """The newest page of a URL has the smallest."""
    return NewestUrl.words("http://a.org/", timestamp, True)[1:-1]


def test_timestamps_of_another_form_are_compared_by_their_first_16_bytes():
    ordered = sorted({text[:16] for text in TEXTS})
    assert len(ordered) == len(TEXTS) - 1
    ranks = [rank_of(text) for text in ordered]
    assert ranks == sorted(set(ranks), reverse=True)
    assert {rank_of(text) for text in TEXTS} == set(ranks)


@each("instant", ["0001", "2019-04-25"])
def test_timestamps_of_another_form_are_older_than_any_instant(instant):
    assert rank_of(instant) < min(map(rank_of, TEXTS))


def test_pages_that_cleaning_kept_come_first_of_those_of_one_address_and_time():
    for number in range(20):
        url = f"http://a.org/{number}"
        kept, dropped = (NewestUrl.words(url, "2019-04-25", kept) for kept in (True, False))
        assert kept[:-1] == dropped[:-1]
        assert (kept[-1] % 2, dropped[-1]) == (0, kept[-1] + 1)
