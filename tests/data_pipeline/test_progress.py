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
from data_pipeline.sources.compression.decompress import open_stream


def test_one_is_singular():
    assert [counted(number, "unit") for number in (0, 1, 2, 2000)] == ["0 units", "1 unit", "2 units", "2,000 units"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_does_not_count_what_passes_before_work_begins():
    """Workers take 10 s to start, then do 25 of 100 MB in 10 s: the rest takes 30 s, not 60."""
    clock, in_progress = Clock(), None
    work = Progress("documents", total=4, size=100_000_000, in_progress=lambda: in_progress, clock=clock)
    clock.now = 105
    assert work.line() == "documents: 0/4, 0 of 100 MB, 5 s"
    clock.now, in_progress = 110, 0
    assert work.line() == "documents: 0/4, 0 of 100 MB, 10 s"
    clock.now, in_progress = 120, 0
    work.finish(25_000_000)
    assert work.line() == "documents: 1/4, 25 of 100 MB, 20 s, 2.5 MB/s, 30 s left"


def test_no_rate_is_shown_of_work_whose_begin_was_not_seen():
    """A unit in this process has read 8 of 23 MB when it is first looked at: nothing says how long that took."""
    clock, in_progress = Clock(), None
    work = Progress("documents", total=1, size=23_000_000, in_progress=lambda: in_progress, clock=clock)
    clock.now, in_progress = 110, 8_000_000
    assert work.line() == "documents: 0/1, 8 of 23 MB, 10 s"
    clock.now, in_progress = 115, 18_000_000
    assert work.line() == "documents: 0/1, 18 of 23 MB, 15 s, 2.0 MB/s, 2 s left"


def test_one_large_file_has_progress_inside_it_which_never_falls():
    clock, in_progress = Clock(), 0
    work = Progress("documents", total=1, size=80_000_000, in_progress=lambda: in_progress, clock=clock)
    clock.now, in_progress = 110, 20_000_000
    assert work.line() == "documents: 0/1, 20 of 80 MB, 10 s, 2.0 MB/s, 30 s left"
    in_progress = 5_000_000  # its worker died, and another one starts again
    assert work.done() == 20_000_000
    in_progress = 90_000_000  # more was read than the file had when the work was planned
    assert work.done() == 80_000_000


def test_items_without_a_size_are_counted():
    clock = Clock()
    work = Progress("verify", total=10, clock=clock)
    clock.now = 108
    work.finish(1)
    work.finish(1)
    assert work.line() == "verify: 2/10, 8 s, 32 s left"


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
