"""Exports that are sent to the Hugging Face Hub."""

import hashlib
from collections.abc import Iterator

import pytest

from data_pipeline.base import stores
from tests.support.hub_server import Hub, serving
from tests.support.in_process import done_here, run_here
from tests.support.small_exports import files_of
from tests.support.tables import each


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.01)
    yield from serving(monkeypatch, "hf_writes")


def test_an_export_is_sent_to_a_private_repository_of_the_hub(hub, checkpoint, tmp_path):
    out = tmp_path / "out"
    told = done_here("pretrain", "export", checkpoint, out, "--push-to-hub", "me/mine").splitlines()
    repository = hub.repositories["models/me/mine"]
    (commit,) = repository.commits
    assert repository.private
    assert repository.commits[commit] == files_of(out)
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() in hub.large
    assert told[1] == f"sent: {hub.url}/me/mine/commit/{commit}"
    done_here("pretrain", "export", checkpoint, tmp_path / "public", "--push-to-hub", "me/public", "--public")
    assert not hub.repositories["models/me/public"].private


@each(
    "token, name, said",
    [
        ("hf_old", "mine", "401"),
        ("hf_writes", "my/own/model", "--push-to-hub: "),
        ("hf_reads", "mine", "403"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_way_out(hub, checkpoint, token, name, said, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    done = run_here("pretrain", "export", checkpoint, tmp_path / "out", "--push-to-hub", name)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, said in line) == (1, True)
    assert line.endswith(f"; to send it: hf upload {name} {tmp_path / 'out'} . --private")
    assert (tmp_path / "out/model.safetensors").exists()
    assert hub.repositories == {}
