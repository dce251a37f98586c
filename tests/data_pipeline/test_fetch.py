"""Fetching from a real local server that breaks off, sends wrong data, asks for pauses and changes its files."""

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

import pytest

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.tools.fetch.catalogues import c4_files, wet_files, wikipedia_files
from data_pipeline.tools.fetch.client import Client
from data_pipeline.tools.fetch.many import Outcome, fetch_files
from data_pipeline.tools.fetch.published import PublishedFile
from tests.in_process import run_here

FETCH = (
    "from data_pipeline.foundation.command import run_command;"
    "from data_pipeline.tools.fetch.commands import fetch_app;"
    "run_command(fetch_app)"
)
CRAWL = "CC-MAIN-2019-18"
WET = f"crawl-data/{CRAWL}/segments/1555578517558.8/wet/CC-MAIN-20190418101243-20190418122248-0000{{}}.warc.wet.gz"
MIB = 1 << 20


class Server:
    """Serves `content` (path → bytes) with ranges and ETags. `plans`: path → answers to its next requests, in order."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.plans: dict[str, list[Callable[[Handler], None]]] = {}
        self.requests: list[tuple[str, dict[str, str], float]] = []
        self.bytes_sent, self.bytes_per_second = 0, 0
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
        return [headers.get("range") for asked, headers, _ in self.requests if asked == path]


class Handler(BaseHTTPRequestHandler):
    def __init__(self, server: Server, *arguments: object):
        self.site = server
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.name = self.path.lstrip("/")
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.site.requests.append((self.name, headers, time.monotonic()))
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
        for start in range(0, len(data), 1 << 16):
            block = data[start : start + (1 << 16)]
            try:
                self.wfile.write(block)
            except OSError:
                return
            self.site.bytes_sent += len(block)
            if self.site.bytes_per_second:
                time.sleep(len(block) / self.site.bytes_per_second)


def serve(handler: Handler, until: int | None = None, ranges: bool = True, content: bytes | None = None) -> None:
    """A correct answer. `until`: break off at this byte; `ranges`: honour Range headers; `content`: of another file."""
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
    handler.close_connection = True
    return None


def drop(handler: Handler, at: int) -> None:
    """Sends some bytes and resets the connection, as when a machine goes down."""
    serve(handler, until=at)
    time.sleep(0.05)  # a reset discards what the client hasn't read yet
    handler.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def status(handler: Handler, code: int, **headers: object) -> None:
    handler.reply(code, Content_Length=0, **headers)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = Server()
    yield running
    running.close()


def quick(tries: int = 5, rate: float = 1000) -> Client:
    return Client(requests_per_second=rate, tries=tries, first_wait=0.01)


def fetch(folder: Path, *files: PublishedFile, client: Client | None = None, recheck: bool = False) -> Outcome:
    return fetch_files(files, folder, client or quick(), connections=4, recheck=recheck)


def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
    """Starts the command in a process of its own."""
    program = [sys.executable, "-c", FETCH, *map(str, arguments), "--requests-per-second", "1000"]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]


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


@pytest.mark.parametrize("breaking", [drop, lambda handler, at: serve(handler, until=at)], ids=["reset", "truncated"])
def test_a_broken_off_file_goes_on_at_the_next_byte(server: Server, tmp_path: Path, breaking: Callable) -> None:
    file = server.publish("big", 1_000_000)
    server.plans["big"] = [partial(breaking, at=300_001), partial(breaking, at=700_002)]
    assert not fetch(tmp_path, file).failed
    assert visible(tmp_path) == server.content
    assert server.ranges("big") == [None, "bytes=300001-", "bytes=700002-"]
    assert server.bytes_sent == 1_000_000
    tag = f'"{hashlib.md5(server.content["big"]).hexdigest()}"'
    assert [headers.get("if-range") for _, headers, _ in server.requests] == [None, tag, tag]


def test_a_server_that_ignores_ranges_starts_the_file_again(server: Server, tmp_path: Path) -> None:
    file = server.publish("big", 1_000_000)
    server.plans["big"] = [partial(serve, until=400_000), partial(serve, ranges=False)]
    assert not fetch(tmp_path, file).failed
    assert visible(tmp_path) == server.content
    assert len(server.requests) == 2


def test_two_versions_of_a_file_are_never_joined(server: Server, tmp_path: Path) -> None:
    server.publish("a", 100_000)
    new = random.Random(1).randbytes(100_000)
    server.plans["a"] = [partial(serve, until=50_000), partial(serve, content=new)]
    assert not fetch(tmp_path, PublishedFile(f"{server.url}a", "a")).failed  # no published checksum could show it
    assert visible(tmp_path) == {"a": new}
    assert server.ranges("a") == [None, "bytes=50000-"]


def test_a_range_of_another_version_is_refused_even_if_granted(server: Server, tmp_path: Path) -> None:
    def grant_anyway(handler: Handler) -> None:
        begin = int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        span = f"bytes {begin}-{len(new) - 1}/{len(new)}"
        handler.reply(206, Content_Length=len(new) - begin, Content_Range=span, ETag='"new"')
        handler.send(new[begin:])

    server.publish("a", 100_000)
    new = random.Random(1).randbytes(100_000)
    server.plans["a"] = [partial(serve, until=50_000), grant_anyway, partial(serve, content=new)]
    assert not fetch(tmp_path, PublishedFile(f"{server.url}a", "a")).failed
    assert visible(tmp_path) == {"a": new}
    assert server.ranges("a") == [None, "bytes=50000-", None]


def test_a_server_that_always_breaks_off_at_the_same_byte_is_given_up(server: Server, tmp_path: Path) -> None:
    bad, good = server.publish("bad", 5 * MIB), server.publish("good", 1000)
    server.plans["bad"] = [partial(serve, until=2 * MIB, ranges=False)] * 100
    outcome = fetch(tmp_path, bad, good, client=quick(tries=4))
    assert list(outcome.failed) == ["bad"]
    assert "after 2,097,152 of 5,242,880 bytes" in outcome.failed["bad"]
    assert len(server.ranges("bad")) == 4  # the first 2 MiB are progress, the same again isn't
    assert list(visible(tmp_path)) == ["good"]


def test_a_large_file_may_need_more_pieces_than_there_are_tries(server: Server, tmp_path: Path) -> None:
    file = server.publish("big", 9 * MIB)
    server.plans["big"] = [partial(serve, until=piece * MIB) for piece in range(1, 9)]
    assert not fetch(tmp_path, file, client=quick(tries=3)).failed
    assert visible(tmp_path) == server.content
    assert server.bytes_sent == 9 * MIB


# --- wrong content


def test_a_wrong_checksum_is_tried_again(server: Server, tmp_path: Path) -> None:
    file = server.publish("a", 100_000)
    server.plans["a"] = [partial(serve, content=bytes(100_000))]
    assert not fetch(tmp_path, file).failed
    assert visible(tmp_path) == server.content
    assert server.ranges("a") == [None, None]


def test_a_file_that_stays_wrong_is_named_and_the_rest_goes_on(server: Server, tmp_path: Path) -> None:
    files = [server.publish(name, 50_000) for name in "abc"]
    server.content["b"] = bytes(50_000)
    outcome = fetch(tmp_path, *files)
    assert list(outcome.failed) == ["b"]
    assert files[1].checksum
    assert files[1].checksum in outcome.failed["b"]
    assert sorted(visible(tmp_path)) == ["a", "c"]
    assert server.bytes_sent == 2 * 50_000 + 3 * 50_000


def test_another_size_than_published_is_not_downloaded(server: Server, tmp_path: Path) -> None:
    file = server.publish("a", 1000)
    server.content["a"] = bytes(3_000_000)
    assert "offers 3,000,000 bytes, but the published size is 1,000" in fetch(tmp_path, file).failed["a"]
    assert not visible(tmp_path)


@pytest.mark.parametrize("wrong", [lambda data: data[:-50], lambda data: b"<html>please log in</html>"])
def test_without_a_checksum_a_gz_must_be_whole(server: Server, tmp_path: Path, wrong: Callable) -> None:
    path, other = server.publish_crawl(2)
    server.content[path] = wrong(server.content[path])
    outcome = fetch(tmp_path, *wet_files(quick(), CRAWL, server.url))
    assert "no complete gzip file" in outcome.failed[path]
    assert list(visible(tmp_path)) == [other]


# --- a server that is busy or refuses


def test_retry_after_holds_all_connections_back(server: Server, tmp_path: Path) -> None:
    files = [server.publish(name, 1000) for name in "abcdefgh"]
    server.plans["a"] = [partial(status, code=503, Retry_After=1)]
    client = quick(rate=20)
    assert not fetch(tmp_path, *files, client=client).failed
    assert visible(tmp_path) == server.content
    refused, *_ = (moment for path, _, moment in server.requests if path == "a")
    assert len(server.requests) == 9
    assert sum(0 < moment - refused < 0.95 for _, _, moment in server.requests) <= 1  # one may have been in progress


def test_a_busy_server_is_asked_a_bounded_number_of_times(server: Server, tmp_path: Path) -> None:
    file = server.publish("a", 1000)
    server.plans["a"] = [partial(status, code=503)] * 50
    outcome = fetch(tmp_path, file, client=quick(tries=6))
    assert "503" in outcome.failed["a"]
    assert "given up after 6 tries" in outcome.failed["a"]
    assert len(server.requests) == 6


def test_a_long_pause_ends_the_command_instead_of_hanging(server: Server, tmp_path: Path) -> None:
    file = server.publish("a", 1000)
    server.plans["a"] = [partial(status, code=429, Retry_After=86400)]
    with pytest.raises(FailedError, match="86,400 s"):
        fetch(tmp_path, file)
    assert len(server.requests) == 1


def test_requests_keep_the_pace(server: Server, tmp_path: Path) -> None:
    fetch(tmp_path, *(server.publish(str(number), 10) for number in range(11)), client=quick(rate=20))
    times = [moment for _, _, moment in server.requests]
    assert max(times) - min(times) >= 0.45


def test_a_server_that_refuses_everything_is_soon_left_alone(server: Server, tmp_path: Path) -> None:
    files = [PublishedFile(f"{server.url}{number}", str(number)) for number in range(200)]
    for file in files:
        server.plans[file.path] = [partial(status, code=403)]
    with pytest.raises(FailedError, match=r"10 files in a row .* 403"):
        fetch(tmp_path, *files)
    assert len(server.requests) <= 10 + 4


def test_a_redirect_to_a_local_file_is_refused(server: Server, tmp_path: Path) -> None:
    server.plans["a"] = [partial(status, code=302, Location="file:///etc/hostname")]
    outcome = fetch(tmp_path, PublishedFile(f"{server.url}a", "a"))
    assert list(outcome.failed) == ["a"]
    assert not visible(tmp_path)


def test_servers_learn_who_asks(server: Server, tmp_path: Path) -> None:
    client = Client(contact="someone@example.org")
    fetch(tmp_path, server.publish("a", 10), client=client)
    name = server.requests[0][1]["user-agent"]
    assert name.startswith("encdec-pretrain/")
    assert "someone@example.org" in name


# --- lists


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("arguments", [["wet", CRAWL], ["wikipedia", "enwiki", "20010101"], ["c4"]])
def test_what_is_not_published_is_one_line_and_2(server: Server, tmp_path: Path, arguments: list[str]) -> None:
    done = run(*arguments, tmp_path / "out", "--base-url", server.url)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert len(server.requests) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
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


def test_a_file_that_changed_on_disk_is_fetched_again(server: Server, tmp_path: Path) -> None:
    files = [server.publish(name, 1000) for name in "ab"]
    fetch(tmp_path, *files)
    (tmp_path / "a").write_bytes(bytes(1000))
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
    assert visible(tmp_path) == server.content


def test_a_file_brought_by_other_means_counts_if_its_checksum_is_right(server: Server, tmp_path: Path) -> None:
    files = [server.publish(name, 1000) for name in "ab"]
    (tmp_path / "a").write_bytes(server.content["a"])
    (tmp_path / "b").write_bytes(b"something else")
    outcome = fetch(tmp_path, *files)
    assert (outcome.fetched, outcome.present) == (1, 1)
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

    def limit() -> None:  # the kernel then refuses to let a file grow further
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    with start("wet", CRAWL, tmp_path, "--base-url", server.url, preexec_fn=limit) as limited:
        _, errors = limited.communicate()
    assert limited.returncode == 1
    assert len(errors.splitlines()) == 1
    assert "can't write" in errors
    assert run("wet", CRAWL, tmp_path, "--base-url", server.url).returncode == 0
    assert len(visible(tmp_path)) == 6


def test_two_commands_in_one_folder(server: Server, tmp_path: Path) -> None:
    fetch(tmp_path, server.publish("a", 10))
    with (tmp_path / ".fetch" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FailedError, match="another fetch"):
            fetch(tmp_path, server.publish("b", 10))


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_stopped_command_goes_on_where_it_was(server: Server, tmp_path: Path, how: signal.Signals, code: int) -> None:
    paths = server.publish_crawl(4, size=1_000_000)
    server.bytes_per_second = 300_000  # slow enough to be stopped in time on a busy machine
    arguments = ["wet", CRAWL, tmp_path, "--base-url", server.url]
    process = start(*arguments)
    while server.bytes_sent < 1_000_000:
        time.sleep(0.01)
    process.send_signal(how)
    process.communicate()
    assert process.returncode == code
    assert not visible(tmp_path)  # none was waited for
    have = {path: (tmp_path / ".fetch" / f"{path}.part").stat().st_size for path in paths}
    assert sum(have.values()) > 500_000
    server.bytes_per_second = 0
    server.requests.clear()
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert visible(tmp_path) == {path: server.content[path] for path in paths}
    assert {path: server.ranges(path) for path in paths} == {path: [f"bytes={have[path]}-"] for path in paths}
    assert not list(tmp_path.rglob("*.part*"))
