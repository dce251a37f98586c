"""The display of long work: counts, and an estimate of the time left."""

import gzip
import io
import sys
import threading

from data_pipeline.foundation import progress
from data_pipeline.foundation.formatting import counted
from data_pipeline.foundation.progress import (
    Progress,
    activity,
    advance,
    bytes_done,
    reporting_progress,
    set_activity,
    track,
)
from data_pipeline.sources.decompress import open_stream
from tests.tables import each


def test_one_is_singular():
    assert [counted(number, "unit") for number in (0, 1, 2, 2000)] == ["0 units", "1 unit", "2 units", "2,000 units"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@each(
    "work, at_first, looks",
    [
        (  # workers take 10 s to start, then do 25 of 100 MB in 10 s: the rest takes 30 s, not 60
            {"total": 4, "size": 100_000_000},
            None,
            [
                (5, None, (), "0/4, 0 of 100 MB, 5 s"),
                (10, 0, (), "0/4, 0 of 100 MB, 10 s"),
                (20, 0, (25_000_000,), "1/4, 25 of 100 MB, 20 s, 2.5 MB/s, 30 s left"),
            ],
        ),
        (  # a unit in this process has read 8 of 23 MB when it is first looked at: nothing says how long that took
            {"total": 1, "size": 23_000_000},
            None,
            [
                (10, 8_000_000, (), "0/1, 8 of 23 MB, 10 s"),
                (15, 18_000_000, (), "0/1, 18 of 23 MB, 15 s, 2.0 MB/s, 2 s left"),
            ],
        ),
        (  # the worker of a large file dies, and another one starts again; then it reads more than the file had
            {"total": 1, "size": 80_000_000},
            0,
            [
                (10, 20_000_000, (), "0/1, 20 of 80 MB, 10 s, 2.0 MB/s, 30 s left"),
                (15, 5_000_000, (), "0/1, 20 of 80 MB, 15 s, 1.3 MB/s, 45 s left"),
                (20, 90_000_000, (), "0/1, 80 of 80 MB, 20 s, 4.0 MB/s, 0 s left"),
            ],
        ),
        ({"total": 10}, 0, [(8, 0, (1, 1), "2/10, 8 s, 32 s left")]),
    ],
)
def test_what_is_done_never_falls_and_the_time_left_is_that_of_the_work_alone(work, at_first, looks):
    clock, in_progress = Clock(), at_first
    progress = Progress("documents", in_progress=lambda: in_progress, clock=clock, **work)
    for seconds, in_progress, finished, line in looks:  # noqa: B007
        clock.now = 100 + seconds
        for size in finished:
            progress.finish(size)
        assert progress.line() == f"documents: {line}"


def test_a_worker_notes_the_stored_bytes_that_it_has_read(tmp_path, monkeypatch):
    """With several gzip members, each chunk that is read counts once, though its rest goes to the next member."""
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_WRITES", 0.0)
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "plain").write_bytes(b"x" * 700_000)
    (tmp_path / "members.gz").write_bytes(b"".join(gzip.compress(bytes([n]) * 1000) for n in range(100)))
    assert bytes_done(notes) is None
    with reporting_progress(notes / "other-unit"):
        advance(1)
        for name in ("plain", "members.gz"):
            with reporting_progress(notes / "unit"), open_stream(str(tmp_path / name)) as stream:
                stream.read()
                assert bytes_done(notes) == 1 + (tmp_path / name).stat().st_size
            assert bytes_done(notes) == 1
    assert bytes_done(notes) is None
    advance(5)  # in a process without a unit it counts nowhere


def test_a_single_item_says_what_it_does_in_place_of_a_count(tmp_path):
    clock = Clock()
    work = Progress("tokenizer", total=1, doing=lambda: activity(tmp_path), clock=clock)
    clock.now = 105
    assert work.line() == "tokenizer: 0/1, 5 s"
    with reporting_progress(tmp_path / "spiece"):
        set_activity("reading part 3 of 20")
        clock.now = 110
        assert work.line() == "tokenizer: reading part 3 of 20, 10 s"
        advance(7)
        set_activity("training on 38.1 MB of text")
        assert (work.line(), bytes_done(tmp_path)) == ("tokenizer: training on 38.1 MB of text, 10 s", 7)
    assert Progress("tokens", total=2, doing=lambda: "writing", clock=clock).line() == "tokens: 0/2, 0 s"


def test_lines_appear_while_one_item_takes_long(monkeypatch):
    told = threading.Event()

    class Printed(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("documents: 0/1, 1 of 4 MB") and text.endswith("s left"):
                told.set()
            return len(text)

    def slow():
        yield told.wait(120)

    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.001)
    monkeypatch.setattr(sys, "stderr", Printed())
    assert list(track(slow(), 1, "documents", lambda item: 4_000_000, 4_000_000, lambda: 1_000_000)) == [True]
