"""What a terminal shows of work that is done, and how long the rest takes."""

import contextlib
import gzip
import hashlib
import io
import os
import pty
import subprocess
import sys
import threading

from data_pipeline.base import progress
from data_pipeline.base.progress import Activity, Board
from data_pipeline.base.stores import Checksum
from data_pipeline.sources.decompress import open_stream
from tests.support.tables import each


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@each(
    "work, seconds, in_progress, finished, line",
    [
        ({"total": 4, "size": 100_000_000}, 5, 0, (), "0/4, 0 of 100 MB, 5 s"),
        ({"total": 4, "size": 100_000_000}, 10, 0, (25_000_000,), "1/4, 25 of 100 MB, 10 s, 2.5 MB/s, 30 s left"),
        ({"total": 1, "size": 80_000_000}, 10, 20_000_000, (), "0/1, 20 of 80 MB, 10 s, 2.0 MB/s, 30 s left"),
        # a second worker reads a file again whose first worker has died
        ({"total": 1, "size": 80_000_000}, 20, 90_000_000, (), "0/1, 80 of 80 MB, 20 s, 4.0 MB/s, 0 s left"),
        ({"total": 10}, 8, 0, (1, 1), "2/10, 8 s, 32 s left"),
    ],
)
def test_the_time_left_follows_from_what_is_done(work, seconds, in_progress, finished, line):
    clock = Clock()
    shown = progress.Progress("documents", in_progress=lambda: in_progress, clock=clock, **work)
    clock.now += seconds
    for size in finished:
        shown.finish(size)
    assert shown.line() == f"documents: {line}"


def test_a_worker_notes_the_stored_bytes_that_it_has_read(tmp_path):
    """With several gzip members, each chunk that is read counts once, though its rest goes to the next member."""
    (tmp_path / "plain").write_bytes(b"x" * 700_000)
    (tmp_path / "members.gz").write_bytes(b"".join(gzip.compress(bytes([n]) * 1000) for n in range(100)))
    for name in ("plain", "members.gz"):
        checksum = Checksum(str(tmp_path / name), Activity(name))
        with open_stream(checksum.path, checksum) as stream:
            stream.read()
        stored = (tmp_path / name).read_bytes()
        assert checksum.progress == Activity(name, done=len(stored))
        assert checksum.finish() == (len(stored), hashlib.sha256(stored).hexdigest())


def test_reports_of_workers_are_kept_by_unit_as_long_as_they_do_nothing_else():
    board = Board()
    for process in (1, 2):
        board.note("node", process, Activity(f"unit-{process}", done=process))
    board.note("other", 1, Activity("unit-2", tries=1, done=7))  # it was lost, and is done again
    board.note("node", 1, Activity("unit-3"))
    expected = {"unit-2": ("other", Activity("unit-2", 1, 7)), "unit-3": ("node", Activity("unit-3"))}
    assert board.by_unit() == expected


SHOWN = """
from data_pipeline.base.progress import activity_shown, set_activity
with activity_shown("reading the file"):
    set_activity("counting")
    set_activity("writing")
"""


def test_a_terminal_shows_what_is_done_until_it_is_done_and_a_pipe_nothing():
    terminal, inside = pty.openpty()
    quiet, seen = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, check=True), b""
    assert (quiet.stdout, quiet.stderr) == (b"", b"")
    with subprocess.Popen([sys.executable, "-c", SHOWN], stdout=subprocess.PIPE, stderr=inside) as process:
        os.close(inside)
        with contextlib.suppress(OSError):  # nobody has it any more
            while True:
                seen += os.read(terminal, 65536)
        assert process.stdout.read() == b""
    os.close(terminal)
    first, last = seen.index(b"reading the file, 0 s"), seen.rindex(b"writing, ")
    assert first < last < seen.rindex(b"\x1b[2K")  # which empties the line


def test_a_single_item_says_what_it_does_in_place_of_a_count():
    clock, doing = Clock(), ""
    work = progress.Progress("tokenizer", total=1, doing=lambda: doing, clock=clock)
    clock.now = 105
    assert work.line() == "tokenizer: 0/1, 5 s"
    doing = "reading part 3 of 20"
    clock.now = 110
    assert work.line() == "tokenizer: reading part 3 of 20, 10 s"
    assert progress.Progress("tokens", total=2, doing=lambda: "writing", clock=clock).line() == "tokens: 0/2, 0 s"


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
    shown = progress.Progress("documents", 1, 4_000_000, in_progress=lambda: 1_000_000)
    assert list(progress.track(slow(), shown, lambda item: 4_000_000)) == [True]
