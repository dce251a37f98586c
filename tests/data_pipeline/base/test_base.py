"""What all packages share: whole directories, locks, versions, hidden passwords, progress, and late imports."""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import io
import os
import pty
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file

from data_pipeline.base import atomic, packages, processes, progress
from data_pipeline.base.arrow_tables import table_of
from data_pipeline.base.atomic import lock, new_directory, remove_leftovers, temporary_path
from data_pipeline.base.errors import StoreUnavailable, UserError, may_be_of_node
from data_pipeline.base.formatting import counted, masked, masked_code, masked_values, without_login
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.packages import code_version
from data_pipeline.base.processes import caught
from data_pipeline.base.progress import Activity, Board
from data_pipeline.base.stores import Checksum
from data_pipeline.loading.reader import DiskCache
from data_pipeline.sources.decompress import open_stream
from pretrain.run import status
from tests.support.tables import each


def test_a_new_directory_appears_when_its_block_ends_and_none_if_that_fails(tmp_path):
    out = tmp_path / "above/out"
    with new_directory(out) as partial:
        (partial / "below").mkdir()
        (partial / "below/file").write_text("content")
        assert not out.exists()
    assert (out / "below/file").read_text() == "content"
    with pytest.raises(FileExistsError), new_directory(tmp_path / "above/failed") as partial:
        partial.mkdir()
    assert list(out.parent.iterdir()) == [out]


def test_what_is_there_is_not_replaced_unless_it_is_an_empty_directory(tmp_path):
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match="exists already; choose another directory"), new_directory(taken):
            pass
    (tmp_path / "empty").mkdir()
    with new_directory(tmp_path / "empty") as partial:
        (partial / "file").touch()
    assert (tmp_path / "empty/file").exists()


def test_what_a_killed_writer_left_is_found_by_its_name_and_place_and_other_writers_files_stay(tmp_path):
    (tmp_path / "own/below").mkdir(parents=True)
    (tmp_path / "another").mkdir()
    folders = [tmp_path, tmp_path / "own", tmp_path / "own/below", tmp_path / "another"]
    left = [temporary_path(folder / name) for folder in folders for name in ("out", "a\nfile")]
    theirs = {folder / name for folder in folders for name in (".theirs.tmp", ".file.0123abcd-1.tmp")}
    for path in (*left, *theirs):
        path.touch()
    left[0].unlink()
    left[0].mkdir()
    remove_leftovers(tmp_path, ["own", "missing"])
    assert set(tmp_path.rglob(".*")) == theirs | set(left[-2:])
    remove_leftovers(tmp_path)
    assert set(tmp_path.rglob(".*")) == theirs


def test_lock_is_exclusive_or_shared_and_ends_with_its_file(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    with path.open() as first, path.open() as second:
        lock(first, None, shared=True)
        lock(second, None, shared=True)
        with pytest.raises(BlockingIOError), path.open() as third:
            lock(third, None)
    with path.open() as third:
        lock(third, None)


def cached(folder: Path) -> None:
    content = bytes(100)
    DiskCache(folder, limit=1).get(hashlib.sha256(content).hexdigest(), lambda: content)


def built(folder: Path) -> None:
    corpus = LocalStore(folder)
    with corpus.at_work(corpus.begin()):
        pass


def trained(folder: Path) -> None:
    status.check_lock(folder)
    status.lock(folder).close()
    status.check_lock(folder)


def test_a_run_can_be_locked_while_a_command_looks_whether_it_trains(tmp_path, monkeypatch):
    """The command holds the lock, shared, for a moment."""
    (tmp_path / status.LOCK).touch()
    looks = (tmp_path / status.LOCK).open()
    assert lock(looks, None, shared=True)

    def lock_while_it_looks(file: IO[Any], *given: Any, **options: Any) -> bool:
        try:
            return lock(file, *given, **options)
        finally:
            looks.close()

    monkeypatch.setattr(status, "lock_file", lock_while_it_looks)
    with status.lock(tmp_path), pytest.raises(UserError, match="is already training here"):
        status.lock(tmp_path)


@each("take", [status.check_lock, status.lock])
def test_a_restarted_rank_waits_for_the_lock_of_a_lost_machine(take, tmp_path, monkeypatch):
    """A server of NFS 4 releases the lock after 90 s. The time that passes is simulated."""
    held, now = status.lock(tmp_path), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 90:
            held.close()

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with pytest.raises(UserError, match="is already training here"):
        take(tmp_path)
    if file := take(tmp_path, restart=True):
        file.close()
    assert 90 < now < 91


@each("use", [cached, built, trained])
def test_without_locks_all_go_on_and_say_once_what_is_not_protected(use, tmp_path, monkeypatch, capsys):
    """The kernel's answer is simulated, since no file system without locks (such as Lustre by default) is at hand."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    monkeypatch.setattr(atomic, "_warned", set())
    use(tmp_path)
    use(tmp_path)
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"warning: no file locks here (Function not implemented): {tmp_path}")
    assert captured.out == ""


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=Ada", "-c", "user.email=ada@example.org", *arguments]
    alone = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=alone).stdout.strip()


def test_the_codes_version_is_the_commit_and_whether_the_tree_differs_from_it(tmp_path):
    assert code_version(tmp_path) == version("encdec-pretrain")  # no repository
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "--annotate", "v1", "--message", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert len(commit) == 40
    assert code_version(tmp_path) == commit
    (tmp_path / "code.py").write_text("2")
    assert code_version(tmp_path) == f"{commit}-dirty"


def test_the_output_of_git_may_have_bytes_that_are_no_utf_8(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_bytes("é é\n".encode("latin-1"))
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    (tmp_path / "code.py").write_bytes(b"\xff \xc3\xa9\n")
    difference = packages.git("diff", "HEAD", source=tmp_path)
    unknown = "\N{REPLACEMENT CHARACTER}"
    assert difference.splitlines()[-2:] == [f"-{unknown} {unknown}", f"+{unknown} é"]


URLS = {
    "https://me:hunter2@example.org/x": "https://me:***@example.org/x",
    "mysql+pymysql://me:h@nt/er:2@db:3306/mlflow": "mysql+pymysql://me:***@db:3306/mlflow",
    "https://:hunter2@example.org": "https://:***@example.org",
    '{"a": "ftp://u:p1@a/b", "c": "ftp://u:p2@d"}': '{"a": "ftp://u:***@a/b", "c": "ftp://u:***@d"}',
    "https://example.org/x?user=me&password=hunter2&y=1": "https://example.org/x?user=me&password=***&y=1",
    "https://cdn.example.org/x?X-Amz-Signature=abc&y=1": "https://cdn.example.org/x?X-Amz-Signature=***&y=1",
    "https://cdn.example.org/x?Expires=1&Signature=abc~&y": "https://cdn.example.org/x?Expires=1&Signature=***&y",
}
OTHER_URLS = [
    *("https://me@example.org:8080/a", "http://127.0.0.1:5000/", "sqlite:////home/me/runs/mlflow.db"),
    *("s3://bucket/corpora", "a: b@c"),
]
CODE = {
    '+api_key = "abc123def"': '+api_key = "***"',
    "-HF_TOKEN=abc123def # old": "-HF_TOKEN=*** # old",
    '+  "password": "hunter2!",': '+  "password": "***",',
    "+login(hf_abcdefghijklmnopqrst)": "+login(***)",
    "+key: AKIAIOSFODNN7EXAMPLE": "+key: ***",
    "+uri: https://me:hunter2@host": "+uri: https://me:***@host",
    "-----BEGIN RSA PRIVATE KEY-----\n+MIIEow\n-----END": "-----BEGIN RSA PRIVATE KEY-----***-----END",
}
OTHER_CODE = ["+tokens = 512 * 2048000", "+max_new_tokens: 128", "+    tokenizer = load(directory)"]


@each(
    "hide, text, shown",
    [
        *((masked, *pair) for pair in URLS.items()),
        *((masked, url, url) for url in OTHER_URLS),
        *((masked_code, *pair) for pair in CODE.items()),
        *((masked_code, code, code) for code in OTHER_CODE),
    ],
)
def test_what_looks_like_a_secret_is_hidden_and_nothing_else_is(hide, text, shown):
    assert (hide(text), hide(shown)) == (shown, shown)


def test_settings_are_hidden_at_any_depth_and_keep_their_types():
    settings = {"a": [{"uri": "https://me:hunter2@host"}, 3, None, 0.5], "b": True}
    assert masked_values(settings) == {"a": [{"uri": "https://me:***@host"}, 3, None, 0.5], "b": True}
    # a link needs no login
    assert without_login("https://me:***@host:80/a@b") == "https://host:80/a@b"
    assert without_login("https://host/a@b") == "https://host/a@b"


def test_one_is_singular():
    assert [counted(number, "unit") for number in (0, 1, 2, 2000)] == ["0 units", "1 unit", "2 units", "2,000 units"]


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


def test_what_workers_report_is_kept_by_unit_as_long_as_they_do_nothing_else():
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


def in_other_words(path: Path) -> None:
    try:
        gzip.decompress(path.read_bytes())
    except OSError:
        raise UserError(f"{path}: can't be read") from None


def test_a_file_that_another_node_may_see_is_told_from_one_with_wrong_content(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    for name, of_node in {"a.gz": False, "b.gz": True}.items():
        with pytest.raises(UserError) as told:
            in_other_words(tmp_path / name)
        assert may_be_of_node(told.value) is of_node
    assert may_be_of_node(StoreUnavailable("away"))
    assert not may_be_of_node(ZeroDivisionError())


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


def test_a_table_of_rows_is_the_one_that_pyarrow_makes_of_them():
    schema = pa.schema([("a", pa.string()), ("b", pa.large_string()), ("c", pa.int64()), ("d", pa.bool_())])
    some = [("é😀", None, 3, True), ("", "x\0y", None, None), (None, "", -(2**63), False)]
    for rows in ([], some[:1], some * 7, [(None,) * 4] * 9):
        table = table_of(rows, schema)
        table.validate(full=True)
        assert table == table_of([(a and a.encode(), *others) for a, *others in rows], schema)
        assert table.equals(pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema))


def test_the_main_thread_alone_catches_signals():
    """Python refuses a handler elsewhere."""
    before, found = signal.getsignal(signal.SIGUSR1), []

    def look() -> None:
        with caught() as received:
            found.append((signal.getsignal(signal.SIGUSR1), received))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(before, [])]
    with caught() as received:
        signal.raise_signal(signal.SIGUSR1)
    assert received == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == before


@each("umask, files, folder", [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775), (0o077, 0o600, 0o700)])
def test_files_have_the_permissions_of_any_new_file_whichever_library_writes_them(umask, files, folder, tmp_path):
    """safetensors itself makes its files with mode 0600. A mode that is asked for stays."""
    before = os.umask(umask)
    try:
        with atomic.atomic_path(tmp_path / "one") as path:
            save_file({"a": np.zeros(3)}, path)
        with new_directory(tmp_path / "folder") as partial:
            save_file({"a": np.zeros(3)}, partial / "weights")
            (partial / "README.md").write_text("text")
        atomic.write_bytes(tmp_path / "secret", b"password", mode=0o600)
    finally:
        os.umask(before)
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    of_new = {"one": files, "folder": folder, "folder/weights": files, "folder/README.md": files}
    assert modes == {**of_new, "secret": 0o600}
