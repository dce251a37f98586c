"""Fetching from a real local server that breaks off, sends wrong data, asks for pauses and changes its files."""

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
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
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import pytest

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.tools.fetch import client as client_module
from data_pipeline.tools.fetch import download
from data_pipeline.tools.fetch.catalogues import c4_files, wet_files, wikipedia_files
from data_pipeline.tools.fetch.client import Client
from data_pipeline.tools.fetch.many import Outcome, fetch_files
from data_pipeline.tools.fetch.published import PublishedFile
from tests.in_process import run_here
from tests.tables import each

FETCH = (
    "from data_pipeline.foundation.command import run_command;"
    "from data_pipeline.tools.fetch.commands import fetch_app;"
    "run_command(fetch_app)"
)
CRAWL = "CC-MAIN-2019-18"
WET = f"crawl-data/{CRAWL}/segments/1555578517558.8/wet/CC-MAIN-20190418101243-20190418122248-0000{{}}.warc.wet.gz"
KIB = 1 << 10


class Server:
    """Serves `content` (path → bytes) with ranges and ETags. `plans`: path → answers to its next requests, in order."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.plans: dict[str, list[Callable[[Handler], None]]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.bytes_sent, self.received, self.lock = 0, 0, threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self))
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        threading.Thread(target=self._http.serve_forever, args=[0.01], daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def publish(self, path: str, size: int) -> PublishedFile:
        """Publishes a file of random bytes; returns it with size and sha256."""
        content = self.content[path] = random.Random(path).randbytes(size)
        return PublishedFile(self.url + path, path, size, "sha256:" + hashlib.sha256(content).hexdigest())

    def publish_crawl(self, files: int, size: int = 100_000) -> list[str]:
        paths = [WET.format(number) for number in range(files)]
        for path in paths:
            self.content[path] = gzip.compress(random.Random(path).randbytes(size), 0)
        self.content[f"crawl-data/{CRAWL}/wet.paths.gz"] = gzip.compress(
            "".join(f"{path}\n" for path in paths).encode()
        )
        return paths

    def ranges(self, path: str) -> list[str | None]:
        """The header Range of each request for `path`."""
        return [headers.get("range") for asked, headers in self.requests if asked == path]


class Handler(BaseHTTPRequestHandler):
    def __init__(self, server: Server, *arguments: object):
        self.site = server
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.name = self.path.lstrip("/")
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.site.requests.append((self.name, headers))
        plan = self.site.plans.get(self.name)
        answer: Callable[[Handler], None] = plan.pop(0) if plan else serve
        answer(self)

    def log_message(self, *arguments: object) -> None:
        pass

    def reply(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()

    def send(self, data: bytes) -> None:
        with self.site.lock:
            self.site.bytes_sent += len(data)  # counted first: a client may go on as soon as it has them
        with contextlib.suppress(OSError):
            self.wfile.write(data)


def serve(
    handler: Handler,
    until: int | None = None,
    ranges: bool = True,
    content: bytes | None = None,
    then: Callable[[], object] = lambda: None,
) -> None:
    """A correct answer. `until`: break off at this byte; `ranges`: honour Range headers; `content`: of another file;
    `then`: called before the connection is closed."""
    if content is None:
        content = handler.site.content.get(handler.name)
    if content is None:
        return handler.reply(404, Content_Length=0)
    tag = f'"{hashlib.md5(content).hexdigest()}"'
    start, asked = 0, handler.headers.get("Range")
    if asked and ranges and handler.headers.get("If-Range", tag) == tag:
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        span = f"bytes {start}-{len(content) - 1}/{len(content)}"
        handler.reply(206, Content_Length=len(content) - start, Content_Range=span, ETag=tag)
    else:
        handler.reply(200, Content_Length=len(content), ETag=tag)
    handler.send(content[start:until])
    then()
    handler.close_connection = True
    return None


def status(handler: Handler, code: int, **headers: object) -> None:
    handler.reply(code, Content_Length=0, **headers)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = Server()
    yield running
    running.close()


def until(met: Callable[[], bool]) -> None:
    """Returns once the condition is met."""
    end = time.monotonic() + 120
    while not met():
        assert time.monotonic() < end
        time.sleep(0.005)


class Clock(threading.Event):
    """A client's clock and its `stop`, whose waits take no time."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now, client.stop = 0.0, self
        monkeypatch.setattr(client_module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return self.is_set()


def quick(tries: int = 5, rate: float = 1000) -> Client:
    return Client(requests_per_second=rate, tries=tries, first_wait=0.01)


def fetch(folder: Path, *files: PublishedFile, client: Client | None = None, **options: Any) -> Outcome:
    return fetch_files(files, folder, client or quick(), **options)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Starts the command in a process of its own."""
    program = [sys.executable, "-c", FETCH, *map(str, arguments), "--requests-per-second", "1000"]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here("data-pipeline", "fetch", *map(str, arguments), "--requests-per-second", "1000")


def visible(folder: Path) -> dict[str, bytes]:
    """Every file that has its final name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".fetch" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# --- a bad connection


def test_files_are_identical_and_asked_for_once(server: Server, tmp_path: Path) -> None:
    files = [server.publish(f"folder/{number}", 70_000 * number) for number in range(6)]  # an empty one too
    outcome = fetch(tmp_path, *files)
    assert (outcome.fetched, outcome.present, outcome.failed) == (6, 0, {})
    assert visible(tmp_path) == server.content
    assert len(server.requests) == 6
    outcome = fetch(tmp_path, *files)
    assert (outcome.fetched, outcome.present, outcome.received) == (0, 6, 0)
    assert len(server.requests) == 6


def reset(handler: Handler, at: int) -> None:
    """Breaks off as when a machine goes down: what the client hasn't read yet is lost, so it reads all first."""
    serve(handler, until=at)
    until(lambda: handler.site.received == at)
    handler.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def grant_anyway(handler: Handler) -> None:
    """The range that was asked for, of another version."""
    begin = int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
    span = f"bytes {begin}-{len(NEW) - 1}/{len(NEW)}"
    handler.reply(206, Content_Length=len(NEW) - begin, Content_Range=span, ETag='"new"')
    handler.send(NEW[begin:])


NEW = random.Random(1).randbytes(100_000)
cut, new = partial(partial, serve), partial(serve, content=NEW)


@each(
    "answers, ranges, sent",
    [
        ([cut(until=30_001), cut(until=70_002)], [None, "bytes=30001-", "bytes=70002-"], 100_000),
        ([partial(reset, at=30_001), partial(reset, at=70_002)], [None, "bytes=30001-", "bytes=70002-"], 100_000),
        ([cut(until=40_000), cut(ranges=False)], [None, "bytes=40000-"], 140_000),
        ([cut(until=50_000), new], [None, "bytes=50000-"], 150_000),
        ([cut(until=50_000), grant_anyway, new], [None, "bytes=50000-", None], 200_000),
    ],
)
def test_a_file_goes_on_at_the_next_byte_and_two_versions_are_never_joined(
    server: Server, tmp_path: Path, monkeypatch, answers: list, ranges: list, sent: int
) -> None:
    def read(*arguments: Any) -> bytes:
        block = original(*arguments)
        server.received += len(block)
        return block

    original, server.bytes_sent, server.received = download._read, 0, 0
    monkeypatch.setattr(download, "_read", read)
    server.requests.clear()
    file = server.publish("a", 100_000)
    server.plans["a"] = [*answers]
    if new in answers:
        file = PublishedFile(file.url, "a")  # no published checksum could show it
    assert not fetch(tmp_path, file).failed
    assert visible(tmp_path) == {"a": NEW if new in answers else server.content["a"]}
    assert server.ranges("a") == ranges
    tag = f'"{hashlib.md5(server.content["a"]).hexdigest()}"'
    assert [headers.get("if-range") for _, headers in server.requests] == [tag if asked else None for asked in ranges]
    assert server.bytes_sent == sent


def test_new_bytes_are_new_tries_and_the_same_ones_again_are_not(server: Server, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "_PROGRESS", KIB)
    bad, good, large = server.publish("bad", 5 * KIB), server.publish("good", 1000), server.publish("large", 9 * KIB)
    server.plans["bad"] = [partial(serve, until=2 * KIB, ranges=False)] * 100
    server.plans["large"] = [partial(serve, until=piece * KIB) for piece in range(1, 9)]
    outcome = fetch(tmp_path, bad, good, large, client=quick(tries=4))
    assert list(outcome.failed) == ["bad"]
    assert "after 2,048 of 5,120 bytes" in outcome.failed["bad"]
    assert len(server.ranges("bad")) == 4  # the first 2 KiB are progress, the same again isn't
    assert visible(tmp_path) == {name: server.content[name] for name in ("good", "large")}
    assert server.bytes_sent == 1000 + 9 * KIB + 4 * 2 * KIB


# --- wrong content


def test_a_wrong_checksum_is_tried_again_and_a_file_that_stays_wrong_is_named(server: Server, tmp_path: Path) -> None:
    files = [server.publish(name, 50_000) for name in "abc"]
    server.plans["a"] = [partial(serve, content=bytes(50_000))]
    server.content["b"] = bytes(50_000)
    outcome = fetch(tmp_path, *files)
    assert list(outcome.failed) == ["b"]
    assert files[1].checksum
    assert files[1].checksum in outcome.failed["b"]
    assert sorted(visible(tmp_path)) == ["a", "c"]
    assert server.ranges("a") == [None, None]
    assert server.bytes_sent == 2 * 50_000 + 3 * 50_000 + 50_000


@each("wrong", [lambda data: data[:-50], lambda data: b"<html>please log in</html>"])
def test_without_a_checksum_a_gz_must_be_whole(server: Server, tmp_path: Path, wrong: Callable) -> None:
    path, other = server.publish_crawl(2)
    server.content[path] = wrong(server.content[path])
    outcome = fetch(tmp_path, *wet_files(quick(), CRAWL, server.url))
    assert "no complete gzip file" in outcome.failed[path]
    assert list(visible(tmp_path)) == [other]


# --- a server that is busy or refuses


def test_retry_after_holds_all_connections_back(server: Server, tmp_path: Path, monkeypatch) -> None:
    """The request for b breaks off once a waits. Neither goes on before both wait for the 800 seconds."""
    both = threading.Barrier(2)

    class AtOnce(Clock):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout and timeout > 700:
                both.wait(120)
            return super().wait(timeout)

    def break_off(handler: Handler) -> None:
        until(lambda: both.n_waiting == 1)
        serve(handler, until=500)

    files = [server.publish(name, 1000) for name in "ab"]
    server.plans = {"a": [partial(status, code=503, Retry_After=800)], "b": [break_off]}
    client = quick()
    AtOnce(client, monkeypatch)
    assert not fetch(tmp_path, *files, client=client).failed
    assert visible(tmp_path) == server.content
    assert len(server.requests) == 4


@each(
    "answer, told, requests",
    [
        (partial(status, code=503), r"503 .*given up after 6 tries", 6),
        (partial(serve, content=bytes(30_000)), r"offers 30,000 bytes, but the published size is 1,000; given up", 6),
        (partial(status, code=302, Location="file:///etc/hostname"), "not an address", 1),
    ],
)
def test_a_file_that_is_refused_is_asked_for_a_bounded_number_of_times(
    server: Server, tmp_path: Path, answer: Callable, told: str, requests: int
) -> None:
    server.requests.clear()
    server.plans["a"] = [answer] * 50
    outcome = fetch(tmp_path, server.publish("a", 1000), client=quick(tries=6))
    assert re.search(told, outcome.failed["a"])
    assert not visible(tmp_path)
    assert len(server.requests) == requests


def test_a_long_pause_ends_the_command_instead_of_hanging(server: Server, tmp_path: Path) -> None:
    file = server.publish("a", 1000)
    server.plans["a"] = [partial(status, code=429, Retry_After=86400)]
    with pytest.raises(FailedError, match="86,400 s"):
        fetch(tmp_path, file)
    assert len(server.requests) == 1


@each("connections", [1, 4])
def test_requests_keep_the_pace(server: Server, tmp_path: Path, monkeypatch, connections: int) -> None:
    client = quick(rate=20)
    clock = Clock(client, monkeypatch)
    files = [server.publish(str(number), 10) for number in range(11)]
    fetch(tmp_path, *files, client=client, connections=connections)
    # connections that wait at the same time each move the clock
    assert clock.now == pytest.approx(10 / 20) or (connections > 1 and clock.now > 10 / 20)


def test_a_server_that_refuses_everything_is_soon_left_alone(server: Server, tmp_path: Path) -> None:
    files = [PublishedFile(f"{server.url}{number}", str(number)) for number in range(200)]
    for file in files:
        server.plans[file.path] = [partial(status, code=403)]
    with pytest.raises(FailedError, match=r"10 files in a row .* 403"):
        fetch(tmp_path, *files)
    assert len(server.requests) <= 10 + 4


def test_servers_learn_who_asks(server: Server, tmp_path: Path) -> None:
    client = Client(contact="someone@example.org")
    fetch(tmp_path, server.publish("a", 10), client=client)
    name = server.requests[0][1]["user-agent"]
    assert name.startswith("encdec-pretrain/")
    assert "someone@example.org" in name


# --- lists


@each(
    "path",
    ["../../x", "/etc/x", "a/../../x", "a//x", "./x", ".fetch/lock", "a/.hidden", "http://127.0.0.1/x", "a\\..\\x", ""],
)
def test_a_path_that_could_leave_the_folder_is_refused(path: str) -> None:
    with pytest.raises(FailedError, match="refused"):
        PublishedFile("http://127.0.0.1/list", path)


def test_a_hostile_list_writes_nothing(server: Server, tmp_path: Path) -> None:
    server.content[f"crawl-data/{CRAWL}/wet.paths.gz"] = gzip.compress(b"crawl-data/a.gz\n../../escaped\n")
    done = run("wet", CRAWL, tmp_path / "out", "--base-url", server.url)
    assert done.returncode == 1
    assert "'../../escaped'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_the_c4_list_comes_in_pages_with_checksums(server: Server, tmp_path: Path) -> None:
    names = [f"en/c4-validation.{number:05}-of-00008.json.gz" for number in range(8)]
    entries = [{"type": "file", "path": "en/c4-train.00000-of-01024.json.gz", "size": 5}]
    for name in names:
        file = server.publish(f"datasets/allenai/c4/resolve/main/{name}", 3000)
        assert file.checksum
        lfs = {"oid": file.checksum.removeprefix("sha256:"), "size": 3000}
        entries.append({"type": "file", "path": name, "size": 3000, "lfs": lfs})
    pages = [json.dumps(entries[:5]).encode(), json.dumps(entries[5:]).encode()]
    links = ['<https://elsewhere.invalid/api?cursor=2>; rel="next"', ""]

    def page(handler: Handler, number: int) -> None:
        handler.reply(200, Content_Length=len(pages[number]), Link=links[number])
        handler.send(pages[number])

    listing = "api/datasets/allenai/c4/tree/main/en"
    server.plans = {listing: [partial(page, number=0)], f"{listing}?cursor=2": [partial(page, number=1)]}
    options = ["--split", "validation", "--base-url", server.url]
    done = run("c4", tmp_path, *options, "--first", 6, "--last", 7)
    assert (done.returncode, done.stderr) == (0, "")
    assert visible(tmp_path) == {name: server.content[f"datasets/allenai/c4/resolve/main/{name}"] for name in names[6:]}
    assert f"sources.0.path={tmp_path}/en/c4-validation.*.json.gz" in done.stdout

    server.plans = {listing: [partial(page, number=1)]}  # a list that is cut short must not pass for the whole
    links[1] = ""
    with pytest.raises(FailedError, match="expected 8 files of the split validation, it lists 4"):
        c4_files(quick(), "en", "validation", base_url=server.url)


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


def test_a_wikipedia_dump_with_its_indexes_in_order_of_pages(server: Server, tmp_path: Path) -> None:
    names = publish_dump(server)
    done = run("wikipedia", "enwiki", "20240101", tmp_path, "--base-url", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert visible(tmp_path) == {name: server.content[f"enwiki/20240101/{name}"] for name in names}
    parts = [re.findall(r"stream(?:-index)?(\d+)", file.path) for file in _listed(server)]
    assert parts == [["1"], ["1"], ["2"], ["2"], ["10"], ["10"]]
    kinds = [file.checksum.split(":")[0] for file in _listed(server) if file.checksum]
    assert kinds == ["sha1"] * 4 + ["md5"] * 2


def _listed(server: Server) -> list[PublishedFile]:
    return wikipedia_files(quick(), "enwiki", "20240101", base_url=server.url)


def test_a_dump_that_is_not_done_or_has_no_such_job(server: Server) -> None:
    publish_dump(server, "in-progress")
    with pytest.raises(FailedError, match="'in-progress', expected 'done'"):
        _listed(server)
    with pytest.raises(UserError, match="only articlesmultistreamdump"):
        wikipedia_files(quick(), "enwiki", "20240101", "articlesdump", server.url)


@each("arguments", [["wet", CRAWL], ["wikipedia", "enwiki", "20010101"], ["c4"]])
def test_what_is_not_published_is_one_line_and_2(server: Server, tmp_path: Path, arguments: list[str]) -> None:
    server.requests.clear()
    done = run(*arguments, tmp_path / "out", "--base-url", server.url)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert len(server.requests) == 1
    assert not (tmp_path / "out").exists()


@each(
    "arguments, named",
    [
        (["wet", "../2019", "out"], "CC-MAIN-2019-18"),
        (["wet", CRAWL, "out", "--base-url", "ftp://host/"], "--base-url"),
        (["wet", CRAWL, "out", "--files", "1", "--first", "0"], "--files"),
        (["c4", "out", "--config", "fr"], "realnewslike"),
        (["wikipedia", "enwiki", "2024", "out"], "20240101"),
    ],
)
def test_wrong_arguments_are_one_line_and_2(arguments: list[str], named: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr


# --- files on disk


def test_what_is_on_disk_counts_if_its_content_is_right(server: Server, tmp_path: Path) -> None:
    files = [server.publish(name, 1000) for name in "ab"]
    (tmp_path / "a").write_bytes(server.content["a"])  # brought by other means
    (tmp_path / "b").write_bytes(b"something else")
    outcome = fetch(tmp_path, *files)
    assert (outcome.fetched, outcome.present) == (1, 1)
    os.truncate(tmp_path / "a", 999)
    outcome = fetch(tmp_path, *files)
    assert (outcome.fetched, outcome.present) == (1, 1)
    assert visible(tmp_path) == server.content


def test_recheck_finds_what_size_and_time_hide(server: Server, tmp_path: Path) -> None:
    file = server.publish("a", 1000)
    fetch(tmp_path, file)
    before = (tmp_path / "a").stat()
    (tmp_path / "a").write_bytes(bytes(1000))
    os.utime(tmp_path / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetch(tmp_path, file).fetched == 0
    assert fetch(tmp_path, file, recheck=True).fetched == 1
    (tmp_path / "a").write_bytes(bytes(1000))
    os.utime(tmp_path / "a", ns=(0, 0))  # of another time, it is read
    assert fetch(tmp_path, file).fetched == 1
    assert visible(tmp_path) == server.content


def test_too_little_room_is_said_before_anything_is_fetched(server: Server, tmp_path: Path) -> None:
    publish_dump(server)
    path = "enwiki/20240101/dumpstatus.json"
    server.content[path] = server.content[path].replace(b'"size": 20000', b'"size": 900000000000000000')
    done = run("wikipedia", "enwiki", "20240101", tmp_path / "out", "--base-url", server.url)
    assert done.returncode == 1
    assert "only" in done.stderr
    assert len(server.requests) == 1
    assert not (tmp_path / "out").exists()


def test_a_disk_that_takes_no_more_is_one_line_and_1(server: Server, tmp_path: Path) -> None:
    server.publish_crawl(6, size=500_000)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, most))  # the kernel then refuses to let a file grow further
    try:
        limited = run("wet", CRAWL, tmp_path, "--base-url", server.url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert limited.returncode == 1
    assert len(limited.stderr.splitlines()) == 1
    assert "can't write" in limited.stderr
    assert run("wet", CRAWL, tmp_path, "--base-url", server.url).returncode == 0
    assert len(visible(tmp_path)) == 6


def test_two_commands_in_one_folder(server: Server, tmp_path: Path) -> None:
    fetch(tmp_path, server.publish("a", 10))
    with (tmp_path / ".fetch" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FailedError, match="another fetch"):
            fetch(tmp_path, server.publish("b", 10))


@each("how, code", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_stopped_command_goes_on_where_it_was(server: Server, tmp_path: Path, how: signal.Signals, code: int) -> None:
    def half(handler: Handler) -> None:
        serve(handler, until=500_000, then=gate.wait)

    gate = threading.Event()
    paths = server.publish_crawl(4, size=1_000_000)
    server.plans = {path: [half] for path in paths}
    arguments = ["wet", CRAWL, tmp_path, "--base-url", server.url]
    parts = {path: tmp_path / ".fetch" / f"{path}.part" for path in paths}
    process = start(*arguments)
    until(lambda: all(part.exists() and part.stat().st_size for part in parts.values()))
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
