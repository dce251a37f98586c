"""A local server that speaks the Hugging Face Hub's API, as huggingface_hub's client calls it: what repositories have,
their trees in pages, files by ranges, and commits, with large files by Git LFS.

Checksums are git's and hashlib's: a blob's id is the sha1 of its header and content, that of a large file the sha256.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

PAGE = 2  # entries; the Hub's has 1,000
LARGE = 1000  # bytes from which a file is in Git LFS
TOKENS = {"hf_writes": ("me", True), "hf_reads": ("me", False)}  # whose it is, and whether it may write
_DENIED = "Forbidden: you must use a write token to upload to a repository."


@dataclass
class Repository:
    """`commits`: the files of each, by path. `branches`: the commits that they are at."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds `files` to those of a branch; returns the id of the new commit."""
        before = self.commits.get(self.branches.get(branch, ""), {})
        now = {**before, **files}
        commit = hashlib.sha1(repr(sorted(now.items())).encode()).hexdigest()
        self.commits[commit] = now
        self.branches[branch] = commit
        return commit


class Hub:
    """The server at `url`. `repositories` are by kind and name: "datasets/owner/name".

    `fault`: given the method and the path of each request; the status and headers of its answer, or None for the right
    one. `changed`: what is sent in place of a file's bytes.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  # uploaded, by sha256
        self.calm()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (_Handler,), {"hub": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=[0.01], daemon=True).start()

    def calm(self) -> None:
        self.fault: Callable[[str, str], tuple[int, dict[str, str]] | None] = lambda method, path: None
        self.changed: Callable[[bytes], bytes] = lambda content: content
        self.requests: list[tuple[str, str]] = []

    def busy(self, times: dict[str, int]) -> None:
        """Answers 429 to so many requests whose paths have each part."""
        left = {part: itertools.count(number, -1) for part, number in times.items()}

        def fault(method: str, path: str) -> tuple[int, dict[str, str]] | None:
            is_busy = any(part in path and next(counter) > 0 for part, counter in left.items())
            return (429, {}) if is_busy else None

        self.fault = fault

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def serving(patch: pytest.MonkeyPatch, token: str = "hf_reads") -> Iterator[Hub]:
    """A Hub that the environment names. Uploads are by Git LFS: the protocol of Xet has no server to run here."""
    hub = Hub()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        patch.delenv(name, raising=False)
    patch.setenv("HF_ENDPOINT", hub.url)
    patch.setenv("HF_TOKEN", token)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield hub
    hub.close()


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def _do(self) -> None:
        where = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append((self.command, where.path))
        if planned := self.hub.fault(self.command, where.path):
            status, headers = planned
            return self._answer(status, b"{}", headers)
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        for method, pattern, action in _ROUTES:
            if self.command in method and (found := re.fullmatch(pattern, where.path)):
                try:
                    return action(self, *map(unquote, found.groups()), query=query, body=body)
                except _Refused as refused:
                    return self._answer(refused.status, b"{}", {k: v for k, v in refused.headers.items() if v})
        return self._answer(404, b"{}")

    do_GET = do_HEAD = do_POST = do_PUT = _do

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):
                self.wfile.write(content)

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _user(self, writes: bool = False) -> str | None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given not in TOKENS:
            raise _Refused(401, message="Invalid credentials in Authorization header")
        user, may_write = TOKENS.get(given, (None, False))
        if writes and not may_write:
            raise _Refused(403, message=_DENIED)
        return user

    def _repository(self, name: str, writes: bool = False) -> Repository:
        user = self._user(writes)
        found = self.hub.repositories.get(name)
        if found is None or (found.private and user is None):
            raise _Refused(404 if user else 401, "RepoNotFound", "Repository not found")
        if found.gated:
            raise _Refused(403, "GatedRepo", "Access to this dataset is restricted")
        return found

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repository = self._repository(name)
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def _whoami(self, query: Any, body: bytes) -> None:
        if (user := self._user()) is None:
            raise _Refused(401)
        self._json({"name": user, "type": "user", "orgs": []})

    def _info(self, name: str, revision: str = "main", **_: Any) -> None:
        repository = self._repository(name)
        commit, files = self._files(name, revision) if repository.commits else ("", {})
        siblings = [{"rfilename": path} for path in files]
        about = {"id": name.partition("/")[2], "sha": commit, "private": repository.private}
        self._json({**about, "tags": [], "siblings": siblings, "gated": False})

    def _tree(self, name: str, revision: str, folder: str, query: dict[str, str], body: bytes) -> None:
        _, files = self._files(name, revision)
        folder = folder.strip("/")
        below = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for path, content in sorted(files.items()):
            if not path.startswith(below):
                continue
            parts = path[len(below) :].split("/")
            for depth in range(1, len(parts)):
                above = below + "/".join(parts[:depth])
                entries[above] = {"type": "directory", "path": above, "oid": "0" * 40, "size": 0}
            entries[path] = _described(path, content)
        if not entries:
            raise _Refused(404, "EntryNotFound", f"{folder} does not exist")
        if query["recursive"].lower() != "true":
            entries = {path: one for path, one in entries.items() if "/" not in path[len(below) :]}
        start = int(query.get("cursor", 0))
        page, headers = [*entries.values()][start : start + PAGE], {}
        if start + PAGE < len(entries):
            others = f"recursive={query['recursive']}&expand={query['expand']}&cursor={start + PAGE}"
            headers["Link"] = f'<{self.hub.url}{urlsplit(self.path).path}?{others}>; rel="next"'
        self._json(page, headers)

    def _resolve(self, name: str, revision: str, path: str, **_: Any) -> None:
        name = name if name.startswith("datasets/") else f"models/{name}"
        commit, files = self._files(name, revision)
        if path not in files:
            raise _Refused(404, "EntryNotFound", f"{path} does not exist")
        if len(files[path]) < LARGE:
            headers = {"X-Repo-Commit": commit, "ETag": f'"{_described(path, files[path])["oid"]}"'}
            return self._answer(200, files[path], headers)
        oid = hashlib.sha256(files[path]).hexdigest()
        self.hub.large[oid] = files[path]
        return self._answer(302, b"", {"X-Repo-Commit": commit, "Location": f"{self.hub.url}/cdn/{oid}"})

    def _range(self, oid: str, **_: Any) -> None:
        content, headers = self.hub.changed(self.hub.large[oid]), {"Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return self._answer(206, content[start:stop], headers)
        return self._answer(200, content, headers)

    def _create(self, query: Any, body: bytes) -> None:
        user, asked = self._user(writes=True), json.loads(body)
        name = f"{asked.get('organization') or user}/{asked['name']}"
        about = {"url": f"{self.hub.url}/{name}", "name": name}
        if f"models/{name}" in self.hub.repositories:
            return self._answer(409, json.dumps({**about, "error": "You already created this model repo"}).encode())
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repositories[f"models/{name}"] = Repository(private=bool(private))
        return self._json(about)

    def _preupload(self, name: str, revision: str, query: Any, body: bytes) -> None:
        self._repository(name, writes=True)
        modes = [
            {"path": one["path"], "uploadMode": "lfs" if one["size"] >= LARGE else "regular", "shouldIgnore": False}
            for one in json.loads(body)["files"]
        ]
        self._json({"files": modes})

    def _batch(self, name: str, query: Any, body: bytes) -> None:
        self._repository(f"models/{name}", writes=True)
        self._json({"transfer": "basic", "objects": [self._upload(one) for one in json.loads(body)["objects"]]})

    def _upload(self, one: dict[str, Any]) -> dict[str, Any]:
        if one["oid"] in self.hub.large:
            return one
        return {**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}}

    def _put(self, oid: str, query: Any, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400)
        self.hub.large[oid] = body
        self._json({})

    def _commit(self, name: str, revision: str, query: Any, body: bytes) -> None:
        repository = self._repository(name, writes=True)
        files = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        commit = repository.commit(files, revision)
        page = f"{self.hub.url}/{name.removeprefix('models/')}/commit/{commit}"
        self._json({"commitUrl": page, "commitOid": commit, "success": True})

    def _valid(self, query: Any, body: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def log_message(self, *arguments: object) -> None:
        pass


def _described(path: str, content: bytes) -> dict[str, Any]:
    blob, size = content, len(content)
    large = {}
    if size >= LARGE:
        oid = hashlib.sha256(content).hexdigest()
        blob = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()
        large["lfs"] = {"oid": oid, "size": size, "pointerSize": len(blob)}
    git = hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()
    return {"type": "file", "path": path, "oid": git, "size": size, **large}


_NAME = r"((?:datasets|models)/[^/]+/[^/]+)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", "/api/whoami-v2", _Handler._whoami),
    ("GET", f"/api/{_NAME}", _Handler._info),
    ("GET", f"/api/{_NAME}/revision/([^/]+)", _Handler._info),
    ("GET", f"/api/{_NAME}/tree/([^/]+)(.*)", _Handler._tree),
    ("GET HEAD", "/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", _Handler._resolve),
    ("GET HEAD", "/cdn/([0-9a-f]{64})", _Handler._range),
    ("POST", "/api/repos/create", _Handler._create),
    ("POST", "/api/validate-yaml", _Handler._valid),
    ("POST", f"/api/{_NAME}/preupload/([^/]+)", _Handler._preupload),
    ("POST", "/([^/]+/[^/]+)[.]git/info/lfs/objects/batch", _Handler._batch),
    ("PUT", "/lfs/([0-9a-f]{64})", _Handler._put),
    ("POST", f"/api/{_NAME}/commit/([^/]+)", _Handler._commit),
]
