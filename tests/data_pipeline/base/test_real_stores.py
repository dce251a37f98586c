"""Builds on object stores of other makers: SeaweedFS (S3), Azurite (Azure) and fake-gcs-server (Google).

A store is tested where its program is on the PATH and its fsspec package is installed. CONTRIBUTING.md says how.
"""

import hashlib
import importlib.util
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError, StoreError
from data_pipeline.base.object_store import ObjectStore
from data_pipeline.base.open_store import open_store
from data_pipeline.config import CorpusConfig
from data_pipeline.stages.pipeline import build
from tests.conftest import write_c4, write_corpus_file
from tests.data_pipeline.stages.test_builds_in_a_bucket import contents
from tests.support.builds import trained
from tests.support.in_process import done_here, refused_here
from tests.support.object_store import ENVIRONMENT
from tests.support.ports import free_port

# by protocol: the program and the fsspec package
SERVERS = {"s3": ("weed", "s3fs"), "az": ("azurite-blob", "adlfs"), "gs": ("fake-gcs-server", "gcsfs")}
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # published


def _started(protocol: str, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The command of a server on `port`, and what the environment of its clients needs."""
    program, url = SERVERS[protocol][0], f"http://127.0.0.1:{port}"
    if protocol == "s3":
        ports = [f"-{one}={free_port()}" for one in ("master.port", "volume.port", "filer.port")]
        ports += [f"-{one}.port.grpc={free_port()}" for one in ("master", "volume", "filer", "s3")]
        at = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3", f"-s3.port={port}"]
        off = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=100"]
        return [program, "server", *at, *ports, *off], {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}
    if protocol == "az":
        name = "devstoreaccount1"
        account = f"AccountName={name};AccountKey={_AZURITE_KEY};BlobEndpoint={url}/{name}"
        at = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
        options = [*at, "--silent", "--skipApiVersionCheck"]
        return [program, *options], {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account}"}
    at = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url, "-backend", "memory"]
    return [program, *at, "-log-level", "error"], {"STORAGE_EMULATOR_HOST": url, "GOOGLE_CLOUD_PROJECT": "tests"}


@pytest.fixture(scope="module", params=SERVERS)
def bucket(request, tmp_path_factory) -> Iterator[str]:
    """The URL of an empty bucket on a server of its own."""
    protocol, folder, port = request.param, tmp_path_factory.mktemp("server"), free_port()
    program, package = SERVERS[protocol]
    if shutil.which(program) is None or importlib.util.find_spec(package) is None:
        pytest.skip(f"{program} or {package} isn't installed")
    command, environment = _started(protocol, folder, port)
    kind = fsspec.get_filesystem_class(protocol)
    kind.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("wb") as log:
        for name, value in environment.items():
            patch.setenv(name, value)
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not _listens(port):
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
            _make_bucket(protocol)
            yield f"{protocol}://bucket"
        finally:
            server.kill()
            server.wait()
            kind.clear_instance_cache()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _make_bucket(protocol: str) -> None:
    while True:  # SeaweedFS listens before it can store anything
        try:
            fsspec.filesystem(protocol).mkdir("bucket")
            return
        except OSError:
            time.sleep(0.2)


@pytest.fixture(scope="module")
def file(small_corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for part in range(2):
        write_c4(folder / f"c4-{part}.json.gz", records=12, skip=8 * part)
    dedup = {"urls": "newest", "lines": True, "documents": True, "minhash": True}
    return write_corpus_file(folder / "corpus.yaml", dedup=dedup, tokenizer=trained(small_corpus))


def test_a_build_has_the_bytes_of_one_in_a_folder_and_is_verified_repaired_and_not_done_again(bucket, file):
    url = f"{bucket}/corpora/c4"
    done_here("data-pipeline", "build", file, f"output={url}")
    expected = contents(build(load(file, [], CorpusConfig)))
    assert contents(url) == expected
    assert "agree with the manifest" in done_here("data-pipeline", "verify", url)
    assert "to do" not in done_here("data-pipeline", "build", file, f"output={url}")
    name = "documents/part-00001.parquet"
    damaged = bytearray(open_store(url).get(name))
    damaged[len(damaged) // 2] ^= 1
    open_store(url).write(name, bytes(damaged))
    told = done_here("data-pipeline", "build", file, f"output={url}", "--repair")
    assert f"{url}/{name}: damaged, will be rebuilt" in told
    assert contents(url) == expected
    assert hashlib.sha256(open_store(url).get(name)).hexdigest() == expected[name]


def test_one_driver_at_a_time_has_a_corpus(bucket):
    first, second = ObjectStore(f"{bucket}/claimed"), ObjectStore(f"{bucket}/claimed")
    token = first.begin()
    with pytest.raises(FailedError, match="another build is at work on it"):
        second.claim()
    with ObjectStore(f"{bucket}/claimed").at_work(token):
        first.append("finished.jsonl", b"1\n", [])
    first.release()
    assert second.begin() != token
    assert [*second.lines("finished.jsonl")] == [b"1"]
    second.release()


def test_files_are_read_by_ranges_listed_and_deleted(bucket):
    corpus = ObjectStore(f"{bucket}/files")
    assert corpus.names() == corpus.folders("") == []
    corpus.write("a/b/one", b"0123456789")
    with corpus.put("a/two") as path:
        path.write_bytes(b"two")
    corpus.write("a/empty", b"")
    assert sorted(corpus.names()) == ["a/b/one", "a/empty", "a/two"]
    assert sorted(corpus.names("a", deep=False)) == ["a/empty", "a/two"]
    assert corpus.folders("a") == ["b"]
    assert corpus.sizes(["a/b/one", "a/two", "a/empty", "none"]) == {"a/b/one": 10, "a/two": 3, "a/empty": 0}
    assert corpus.ranges("a/b/one", [(0, 3), (4, 4), (8, 20)]) == [b"012", b"", b"89"]
    assert corpus.checksum("a/two") == (3, hashlib.sha256(b"two").hexdigest())
    assert corpus.checksum("a/empty") == (0, hashlib.sha256(b"").hexdigest())
    with pytest.raises(FileNotFoundError):
        corpus.get("none")
    corpus.delete(["a/two", "none"])
    corpus.delete_folder("a/b")
    assert corpus.names() == ["a/empty"]


def test_a_bucket_that_is_not_there_is_refused_in_one_line(bucket, file):
    url = bucket.replace("bucket", "nowhere") + "/c4"
    told = refused_here(2, "data-pipeline", "build", file, f"output={url}")
    assert re.search(f"^error: .*{re.escape(url)}.*there is no bucket 'nowhere'", told)


class _Forbidding(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(403)

    do_PUT = do_POST = do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize("protocol", SERVERS)
def test_a_store_that_forbids_a_request_is_one_line(protocol, tmp_path, monkeypatch):
    pytest.importorskip(SERVERS[protocol][1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Forbidding)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    kind = fsspec.get_filesystem_class(protocol)
    kind.clear_instance_cache()
    try:
        for name, value in _started(protocol, tmp_path, server.server_port)[1].items():
            monkeypatch.setenv(name, value)
        corpus = ObjectStore(f"{protocol}://bucket/c4")
        for request in (lambda: corpus.get("a"), corpus.claim):
            with pytest.raises(StoreError, match=rf"{protocol}://bucket/c4/\S+: permission denied"):
                request()
    finally:
        server.shutdown()
        server.server_close()
        kind.clear_instance_cache()
