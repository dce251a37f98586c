"""Fetching from a real local server that breaks off, sends wrong data, is busy and changes its files."""

import contextlib
import fcntl
import gzip
import hashlib
import json
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import pytest

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.tools import download
from data_pipeline.tools.download import PublishedFile, open_session
from tests.in_process import refused_here, run_here
from tests.tables import each

CRAWL = "CC-MAIN-2019-18"
WET = f"crawl-data/{CRAWL}/segments/1555578517558.8/wet/CC-MAIN-20190418101243-20190418122248-0000{{}}.warc.wet.gz"


class Server:
    """Serves `content` (path → bytes) with ranges. `plans`: path → answers to its next requests, in order."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.plans: dict[str, list[Callable[[Handler], None]]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"site": self}))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=[0.01], daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def publish(self, path: str, size: int) -> PublishedFile:
        """Publishes a file of random bytes; returns it with size and sha256."""
        content = self.content[path] = random.Random(path).randbytes(size)
        return PublishedFile(f"{self.url}/{path}", path, size, "sha256:" + hashlib.sha256(content).hexdigest())

    def publish_crawl(self, files: int, size: int = 100_000) -> list[str]:
        paths = [WET.format(number) for number in range(files)]
        for path in paths:
            self.content[path] = gzip.compress(random.Random(path).randbytes(size), 0)
        self.content[f"crawl-data/{CRAWL}/wet.paths.gz"] = gzip.compress("\n".join(paths).encode())
        return paths

    def ranges(self, path: str) -> list[str | None]:
        """The header Range of each request for `path`."""
        return [headers.get("range") for asked, headers in self.requests if asked == path]


class Handler(BaseHTTPRequestHandler):
    site: Server

    def do_GET(self) -> None:
        self.name = self.path.lstrip("/")
        self.site.requests.append((self.name, {key.lower(): value for key, value in self.headers.items()}))
        plan = self.site.plans.get(self.name) or [serve]
        plan.pop(0)(self)

    def log_message(self, *arguments: object) -> None:
        pass

    def reply(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(data)


def serve(handler, until=None, ranges=True, content=None, then=lambda: None) -> None:
    """A correct answer. `until`: break off at this byte; `ranges`: honour Range headers; `content`: of another file;
    `then`: called before the connection is closed."""
    if content is None:
        content = handler.site.content.get(handler.name)
    if content is None:
        return handler.reply(404, Content_Length=0)
    start, asked = 0, handler.headers.get("Range")
    if asked and ranges:
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            return handler.reply(416, Content_Length=0)
        span = f"bytes {start}-{len(content) - 1}/{len(content)}"
        handler.reply(206, Content_Length=len(content) - start, Content_Range=span)
    else:
        handler.reply(200, Content_Length=len(content))
    handler.send(content[start:until])
    then()
    handler.close_connection = True
    return None


def status(code: int, **headers: object) -> Callable[[Handler], None]:
    return partial(Handler.reply, status=code, Content_Length=0, **headers)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "RETRIES", download.RETRIES.new(total=3, backoff_factor=0.001))
    running = Server()
    yield running
    running.close()


def fetch(folder: Path, *files: PublishedFile, contact: str = "") -> tuple[list[str], dict[str, str]]:
    """The files that were fetched now, and why others could not be."""
    done = download.fetch_files(files, folder, open_session(contact))
    fetched = [one.file.path for one in done if not one.present and not one.problem]
    return fetched, {one.file.path: one.problem for one in done if one.problem}


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Starts the command in a process of its own."""
    program = [sys.executable, "-m", "data_pipeline", "fetch", *map(str, arguments)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here("data-pipeline", "fetch", *map(str, arguments))


def refused(code: int, *arguments: object) -> str:
    return refused_here(code, "data-pipeline", "fetch", *map(str, arguments))


def visible(folder: Path) -> dict[str, bytes]:
    """Every file that has its final name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".fetch" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_files_are_identical_and_asked_for_once(server, tmp_path):
    files = [server.publish(f"folder/{number}", 70_000 * number) for number in range(6)]  # an empty one too
    assert fetch(tmp_path, *files, contact="someone@example.org") == ([file.path for file in files], {})
    assert visible(tmp_path) == server.content
    assert re.match(r"encdec-pretrain/.*someone@example\.org", server.requests[0][1]["user-agent"])
    (tmp_path / "folder/1").write_bytes(b"something else")  # of another size, so it is fetched again
    assert fetch(tmp_path, *files) == (["folder/1"], {})
    assert visible(tmp_path) == server.content
    assert len(server.requests) == 7


def reset(handler: Handler) -> None:
    """Breaks off as when a machine goes down: what the client hasn't read yet is lost."""
    serve(handler, until=50_000)
    handler.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


NEW = random.Random(1).randbytes(100_000)
answer, new = partial(partial, serve), partial(serve, content=NEW)


@each(
    "answers, ranges",
    [
        ([answer(until=30_001), answer(until=70_002)], [None, "bytes=30001-", "bytes=70002-"]),
        ([answer(until=40_000), answer(ranges=False)], [None, "bytes=40000-"]),
        ([answer(until=50_000), new, new], [None, "bytes=50000-", None]),  # another version: from the start
        ([reset, reset], None),
    ],
)
def test_a_file_goes_on_at_the_next_byte_and_two_versions_are_never_joined(server, tmp_path, answers, ranges):
    """A connection that is reset costs no try of the whole."""
    server.requests.clear()
    file = server.publish("a", 100_000)
    server.plans["a"] = [*answers]
    if new in answers:
        file = replace(file, checksum="md5:" + hashlib.md5(NEW).hexdigest())
    assert fetch(tmp_path, file) == (["a"], {})
    assert visible(tmp_path) == {"a": NEW if new in answers else server.content["a"]}
    assert len(server.ranges("a")) == 3 if ranges is None else server.ranges("a") == ranges


@each("wrong", [lambda data: data[:-50], lambda data: b"<html>please log in</html>"])
def test_without_a_checksum_a_gz_must_be_whole(server, tmp_path, wrong):
    path, other = server.publish_crawl(2)
    server.content[path] = wrong(server.content[path])
    _, failed = fetch(tmp_path, *download.wet_files(open_session(), CRAWL, server.url))
    assert "no complete compressed file" in failed[path]
    assert list(visible(tmp_path)) == [other]


@each(
    "answers, told, requests",
    [
        ([status(503, Retry_After=0)] * 3, None, 4),
        ([status(503)] * 50, "503 Server Error", 4),
        ([status(404)] * 50, "404 Client Error", 1),
        ([answer(content=bytes(30_000))] * 50, "30,000 bytes were received, but the published size is 1,000", 2),
        ([answer(until=500, ranges=False)] * 50, "connection lost after 500 bytes", 20),
        ([answer(content=bytes(1000))], None, 2),
        ([answer(content=bytes(1000))] * 50, "but the published one", 2),
        ([status(302, Location="file:///etc/hostname")] * 50, "No connection adapters", 1),
    ],
)
def test_a_server_that_is_busy_breaks_off_or_lies_is_asked_a_bounded_number_of_times(
    server, tmp_path, answers, told, requests
):
    server.requests.clear()
    server.plans["a"] = [*answers]
    fetched, failed = fetch(tmp_path, server.publish("a", 1000), server.publish("b", 10))
    assert told is None or told in failed["a"]
    assert fetched == (["a", "b"] if told is None else ["b"])
    assert visible(tmp_path).keys() == {*fetched}
    assert len(server.ranges("a")) == requests


def test_a_server_that_refuses_everything_is_soon_left_alone(server, tmp_path):
    files = [PublishedFile(f"{server.url}/{number}", str(number)) for number in range(200)]
    for file in files:
        server.plans[file.path] = [status(403)]
    with pytest.raises(FailedError, match=r"10 files in a row .* 403"):
        fetch(tmp_path, *files)


def test_why_a_request_is_repeated_is_said_once(server, tmp_path):
    """Before the waiting, which takes minutes: a server that is busy, and an address where none is."""
    arguments = ("wet", CRAWL, tmp_path / "out", "--base-url", server.url)
    server.plans[f"crawl-data/{CRAWL}/wet.paths.gz"] = [status(503)] * 4
    for stop, why in ((lambda: None, "it answers 503"), (server.close, "Connection refused")):
        stop()
        done = run(*arguments)
        warning, error = done.stderr.splitlines()
        assert done.returncode == 1
        assert re.fullmatch(rf"warning: .*{why}; trying up to 3 times more", warning)
        assert error.startswith(f"error: {server.url}/crawl-data/{CRAWL}/wet.paths.gz: ")


OUTSIDE = "../../x /etc/x a/../../x a//x ./x .fetch/lock a/.hidden http://127.0.0.1/x a\\..\\x"


@each("path", OUTSIDE.split())
def test_a_path_that_could_leave_the_folder_is_refused_before_anything_is_written(server, tmp_path, path):
    server.content[f"crawl-data/{CRAWL}/wet.paths.gz"] = gzip.compress(f"crawl-data/a.gz\n{path}\n".encode())
    assert repr(path) in refused(1, "wet", CRAWL, tmp_path / "out", "--base-url", server.url)
    assert not any(tmp_path.iterdir())


def publish_dump(server: Server, job_status: str = "done") -> list[str]:
    """Publishes a dump as Wikimedia does: numbered parts with page ranges, and an index for each."""
    ranges = {1: "p1p41242", 2: "p41243p151573", 10: "p4045403p5399366"}
    files = {}
    for part, pages in ranges.items():
        for kind in (f"multistream{part}.xml", f"multistream-index{part}.txt"):
            name = f"enwiki-20240101-pages-articles-{kind}-{pages}.bz2"
            content = server.content[f"enwiki/20240101/{name}"] = random.Random(name).randbytes(20_000)
            sha1, md5 = hashlib.sha1(content).hexdigest(), hashlib.md5(content).hexdigest()
            sums = {"md5": md5, "sha1": sha1} if part < 10 else {"md5": md5}
            files[name] = {"size": 20_000, "url": f"/enwiki/20240101/{name}", **sums}
    jobs = {"articlesmultistreamdump": {"status": job_status, "updated": "2024-01-02 10:00:00", "files": files}}
    server.content["enwiki/20240101/dumpstatus.json"] = json.dumps({"version": "0.8", "jobs": jobs}).encode()
    return list(files)


def test_a_wikipedia_dump_with_its_indexes_in_order_of_pages(server, tmp_path):
    names = publish_dump(server)
    done = run("wikipedia", "enwiki", "20240101", tmp_path, "--base-url", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert visible(tmp_path) == {name: server.content[f"enwiki/20240101/{name}"] for name in names}
    parts = [re.findall(r"stream(?:-index)?(\d+)", file.path) for file in _listed(server)]
    assert parts == [["1"], ["1"], ["2"], ["2"], ["10"], ["10"]]
    kinds = [file.checksum.split(":")[0] for file in _listed(server) if file.checksum]
    assert kinds == ["sha1"] * 4 + ["md5"] * 2


def _listed(server: Server, job: str = "articlesmultistreamdump") -> list[PublishedFile]:
    return download.wikipedia_files(open_session(), "enwiki", "20240101", job, server.url)


def test_a_dump_that_is_not_done_or_has_no_such_job(server):
    publish_dump(server, "in-progress")
    with pytest.raises(FailedError, match="'in-progress', expected 'done'"):
        _listed(server)
    with pytest.raises(UserError, match="only articlesmultistreamdump"):
        _listed(server, "articlesdump")


@each(
    "arguments, named, requests",
    [
        (["wet", CRAWL], f"no crawl {CRAWL}", 1),
        (["wikipedia", "enwiki", "20010101"], "no dump of enwiki", 1),
        (["wet", CRAWL, "--base-url", "ftp://host/"], "--base-url", 0),
        (["wet", "listed", "--first", "9"], "--first", 1),
    ],
)
def test_what_is_not_published_and_wrong_arguments_are_one_line_and_2(server, tmp_path, arguments, named, requests):
    server.requests.clear()
    server.content["crawl-data/listed/wet.paths.gz"] = gzip.compress(b"a.gz\n")
    assert named in refused(2, *arguments[:1], "--base-url", server.url, *arguments[1:], tmp_path / "out")
    assert len(server.requests) == requests
    assert not (tmp_path / "out").exists()


# --- files on disk


def test_a_disk_that_takes_no_more_is_one_line_and_1(server, tmp_path):
    server.publish_crawl(6, size=500_000)
    arguments = ["wet", CRAWL, tmp_path, "--base-url", server.url]
    limits = (200_000, resource.RLIM_INFINITY)  # the kernel then refuses to let a file grow further
    process = start(*arguments, preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits))
    _, errors = process.communicate()
    assert process.returncode == 1
    assert len(errors.splitlines()) == 1
    assert "can't write" in errors
    assert run(*arguments).returncode == 0
    assert len(visible(tmp_path)) == 6


def test_two_commands_in_one_folder(server, tmp_path):
    fetch(tmp_path, server.publish("a", 10))
    with (tmp_path / ".fetch" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FailedError, match="another fetch"):
            fetch(tmp_path, server.publish("b", 10))


@each("how, code", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_stopped_command_goes_on_where_it_was(server, tmp_path, how, code):
    def half(handler: Handler) -> None:
        serve(handler, until=500_000, then=gate.wait)

    gate = threading.Event()
    paths = server.publish_crawl(4, size=1_000_000)
    server.plans = {path: [half] for path in paths}
    arguments = ["wet", CRAWL, tmp_path, "--base-url", server.url]
    parts = {path: tmp_path / ".fetch" / f"{path}.part" for path in paths}
    process = start(*arguments)
    while not all(part.exists() and part.stat().st_size for part in parts.values()):
        time.sleep(0.005)
    process.send_signal(how)
    process.communicate()
    gate.set()
    assert process.returncode == code
    assert not visible(tmp_path)  # none was waited for
    have = {path: part.stat().st_size for path, part in parts.items()}
    server.requests.clear()
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert visible(tmp_path) == {path: server.content[path] for path in paths}
    assert {path: server.ranges(path) for path in paths} == {path: [f"bytes={have[path]}-"] for path in paths}
    assert not list(tmp_path.rglob("*.part*"))
