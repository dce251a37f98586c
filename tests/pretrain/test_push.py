"""`pretrain push`, to a server on this machine that takes what huggingface_hub sends and records it."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from tests.in_process import run_here
from tests.ports import free_port
from tests.tables import each

TOKEN = "hf_" + "aSecretOfTheTest" * 2
REPOSITORY = "people/model"


class Hub(ThreadingHTTPServer):
    """Has the repository `REPOSITORY`, if it `exists`; `refuses` every request with a status; keeps what it is sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.exists, self.refuses = True, 0
        self.requests: list[tuple[str, str, str]] = []  # method, path, the token
        self.files: dict[str, bytes] = {}
        self.created: dict[str, object] = {}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer()

    def answer(self):
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append((self.command, self.path, self.headers.get("Authorization", "")))
        path = self.path.split("?")[0]
        if hub.refuses:
            return self.say(hub.refuses, {"error": f"you sent {self.headers['Authorization']}"})
        if path == "/api/repos/create":
            hub.exists, hub.created = True, json.loads(body)
            return self.say(200, {"url": f"{hub.url}/{REPOSITORY}"})
        if path == "/api/validate-yaml":
            return self.say(200, {"errors": [], "warnings": []})
        if not hub.exists:
            return self.say(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if path == f"/api/models/{REPOSITORY}":
            return self.say(200, {"id": REPOSITORY, "siblings": [], "private": True, "sha": "0" * 40})
        if path == f"/api/models/{REPOSITORY}/preupload/main":
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                     for file in json.loads(body)["files"]]  # fmt: skip
            return self.say(200, {"files": files})
        if path == f"/api/models/{REPOSITORY}/commit/main":
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{hub.url}/{REPOSITORY}/commit/{'1' * 40}"
            return self.say(200, {"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""})
        return self.say(404, {"error": f"unexpected {path}"})

    def say(self, status, content, headers=None):
        body = json.dumps(content).encode()
        self.send_response(status)
        beside = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        for name, value in beside.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def export(tmp_path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# model\n")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return folder


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path):
    """Those of the test alone: the token in HF_TOKEN, and an empty place for the file."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    return tmp_path / "token"


def push(export, hub, *options):
    """To a hub, or to its address."""
    done = run_here("pretrain", "push", export, REPOSITORY, "--endpoint", getattr(hub, "url", hub), *options)
    assert TOKEN not in done.stdout + done.stderr
    return done


def test_every_file_arrives_with_the_token_of_the_environment_or_of_the_file(export, hub, monkeypatch, credentials):
    (export / ".cache").write_text("no part of an export")
    (export / "pytorch_model.bin").write_text("neither is this")
    done = push(export, hub)
    assert done.returncode == 0, done.stderr
    assert f"{export}: uploaded to {hub.url}/{REPOSITORY}" in done.stdout
    names = ("README.md", "config.json", "model.safetensors")
    assert hub.files == {name: (export / name).read_bytes() for name in names}
    assert {token for _, path, token in hub.requests if REPOSITORY in path} == {f"Bearer {TOKEN}"}

    monkeypatch.delenv("HF_TOKEN")
    credentials.write_text(TOKEN)
    assert push(export, hub).returncode == 0
    assert hub.requests[-1][2] == f"Bearer {TOKEN}"


def test_a_repository_is_created_on_request(export, hub):
    hub.exists = False
    done = push(export, hub)
    assert done.returncode == 2
    assert f"{hub.url}: has no model {REPOSITORY}, or hides it from this token; --create makes it" in done.stderr
    assert push(export, hub, "--create").returncode == 0
    assert (hub.created["name"], hub.created["organization"]) == ("model", "people")
    assert hub.created.get("visibility") == "private" or hub.created["private"] is True
    assert len(hub.files) == 3


@each(
    "status, code, message",
    [
        (401, 2, "refuses the token (401)"),
        (403, 2, f"the token may not write to {REPOSITORY} (403)"),
        (500, 1, "500"),
    ],
)
def test_what_the_server_refuses_is_one_line_without_the_token(export, hub, status, code, message):
    hub.refuses = status
    done = push(export, hub)
    assert done.returncode == code
    (line,) = done.stderr.strip().splitlines()
    assert message in line


def test_without_token_network_or_export_nothing_is_sent(export, hub, monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    done = push(tmp_path / "empty", hub)
    assert (done.returncode, "not an export: no config.json" in done.stderr) == (2, True)
    nowhere = f"http://127.0.0.1:{free_port()}"
    done = push(export, nowhere)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert f"{nowhere}: can't be reached" in line
    monkeypatch.delenv("HF_TOKEN")
    done = push(export, hub)
    assert (done.returncode, "no token for the Hub: set HF_TOKEN" in done.stderr) == (2, True)
    assert hub.requests == []
