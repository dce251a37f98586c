"""A real S3 server (moto's), behind a proxy that breaks off and answers 503."""

import http.client
import re
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from data_pipeline.base import stores

_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_ENTRY = re.compile(rb"<Contents>\s*<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
_OWN_HEADERS = ("connection", "server", "date")


class ObjectStore:
    """The server and the proxy at `url`. What the proxy does is set by its attributes, and counted.

    `faults`: every fourth request is answered 503, and every third answer breaks off in the middle. `away`: every
    connection is closed without an answer, also after `away_after` puts, or `blocks_left` ranges of shards. `denied`:
    every answer is 403, or that to requests of the method, of the access key or to read the path that it names, or,
    "uploads", that to list or abort uploads. `unconditional`: conditions of requests are ignored. `late`: listings lack
    what was put since it was set. `asked` counts requests by method, and those for listings as "LIST". `puts` counts
    the objects and parts received, `sent` the bytes of answers.
    """

    def __init__(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        # moto has one set of buckets for a process, in which another file's tests may have run a server
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/moto-api/reset", method="POST")
        urllib.request.urlopen(request).close()
        self.lock = threading.Lock()
        self.calm()
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), type("Proxied", (_Proxied,), {"store": self}))
        self._proxy.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"
        threading.Thread(target=self._proxy.serve_forever, args=[0.02], daemon=True).start()

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()
        self._server.stop()

    def calm(self) -> None:
        self.faults = self.away = self.unconditional = self.late = False
        self.unlisted = set[bytes]()
        self.denied: bool | str = False
        self.asked = Counter[str]()
        self.blocks_left = self.away_after = None
        self.requests = self.busy = self.broken = self.puts = self.sent = 0

    def filesystem(self) -> Any:
        return stores.filesystem("s3://")[0]


def copy_corpus(corpus: Path, store: ObjectStore, url: str) -> None:
    """Copies a finished corpus to `url` as `aws s3 cp` does, manifest.json last."""
    files = [path for path in sorted(corpus.rglob("*")) if path.is_file() and ".stages" not in path.parts]
    for path in sorted(files, key=lambda path: path.name == "manifest.json"):
        store.filesystem().put_file(str(path), f"{url}/{path.relative_to(corpus)}")


class _Proxied(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        store = self.store
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with store.lock:
            store.requests += 1
            store.asked["LIST" if "list-type" in self.path else self.command] += 1
            number = store.requests
            if store.blocks_left is not None and "/shards/" in self.path and "Range" in self.headers:
                store.blocks_left -= 1
                store.away |= store.blocks_left < 0
            store.away |= store.away_after is not None and store.puts >= store.away_after
        if store.away:
            self.close_connection = True
            return None
        key = f"Credential={store.denied}/" in self.headers.get("Authorization", "")
        path, _, query = self.path.partition("?")
        of_uploads = (self.command, re.split("[=&]", query)[0]) in (("GET", "uploads"), ("DELETE", "uploadId"))
        of_path = self.command in ("GET", "HEAD") and store.denied == path
        if store.denied in (True, self.command) or key or of_path or (store.denied == "uploads" and of_uploads):
            return self._answer(403, {"Content-Type": "application/xml"}, _DENIED)
        if store.faults and number % 4 == 1:
            with store.lock:
                store.busy += 1
            return self._answer(503, {"Content-Type": "application/xml"}, _SLOW_DOWN)
        connection = http.client.HTTPConnection("127.0.0.1", store.port)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        if store.unconditional:
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _OWN_HEADERS}
        if store.late and self.command == "PUT":
            store.unlisted.add(self.path.split("/", 2)[2].partition("?")[0].encode())
        if store.late and "list-type" in self.path:
            content = _ENTRY.sub(lambda entry: b"" if entry[1] in store.unlisted else entry[0], content)
            kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
        breaks = store.faults and number % 3 == 0 and len(content) > 1
        with store.lock:
            store.puts += self.command == "PUT" and answer.status == 200
            store.broken += breaks
        return self._answer(answer.status, kept, content, len(content) // 2 if breaks else None)

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding"):
                self.send_header(name, value)
        # the answer to HEAD has the length of a body that doesn't follow
        self.send_header("Content-Length", headers.get("Content-Length", str(len(content))))
        self.end_headers()
        if self.command != "HEAD":
            with self.store.lock:
                self.store.sent += len(content[:cut])
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _forward

    def log_message(self, *arguments: object) -> None:
        pass


ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


def forget_filesystems() -> None:
    """fsspec keeps them, with the environment that they were made in."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def new_fork_server(patch: pytest.MonkeyPatch) -> None:
    """Loaders' processes come from a new fork server: one that runs keeps the environment that it was started in.

    That one continues, since it may have children, and it ends only after them.
    """
    server = forkserver.ForkServer()
    for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process", "set_forkserver_preload"):
        patch.setattr(forkserver, name, getattr(server, name))


def serving(patch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A store that the environment names, with an empty bucket `bucket`."""
    store = ObjectStore()
    forget_filesystems()
    try:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": store.url}.items():
            patch.setenv(name, value)
        store.filesystem().mkdir("bucket")
        yield store
    finally:
        store.close()
        forget_filesystems()
