"""How do builds behave on large clusters?

    PYTHONPATH=. python benchmarks/scale.py loop
    PYTHONPATH=. python benchmarks/scale.py cluster [--nodes 20]

`loop`: units that do nothing are handed to two workers by a driver that believes to have more, so that as many are in
flight as on a cluster of that size.

`cluster`: a cluster of raylets with a CPU each, on this machine, builds a corpus while two of them are killed. A third
sees no output directory, a fourth has other code, a fifth has 16 kB free in /tmp. Remote Parquet files are copied there
first, so two thirds of the inputs come from a web server. The bytes are compared with those of a build in one process.
Mount namespaces take root.

`--save` puts the rows into docs/results/scale/.
"""

import argparse
import contextlib
import gzip
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import scale_rows
from ray.cluster_utils import Cluster

from checks.prove.proof import checksums
from data_pipeline.config import RayConfig
from data_pipeline.engine import dispatch, workers
from data_pipeline.engine.context import Attempt, Needs

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "data_pipeline/samples/c4-train.00000-of-01024-first1000.json.gz"
IN_FLIGHT, UNITS = (1000, 8000, 25_600), 40_000  # of `loop`
FILES, RECORDS = 120, 40  # of `cluster`
_OPEN = {"RAY_AUTH_MODE": "disabled"}


def _nothing(number: int, attempt: Attempt) -> int:
    return number


def _processor() -> tuple[float, float]:
    """Seconds of processor time of Ray's workers, which are idle between units, and of the actor they report to."""
    times = {"ray::IDLE": 0.0, "ray::Board": 0.0}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (name := process.name()) in times:
                times[name] += sum(process.cpu_times()[:2])
    return times["ray::IDLE"], times["ray::Board"]


def loop(in_flight: int) -> dict[str, float]:
    """Units a second, the processor time for each, and how long it takes to stop with all these in flight."""
    pool = workers.ready(RayConfig(num_cpus=2))
    cpus = max(2, in_flight - max(in_flight // 11, 64))  # a tenth more units than CPUs are in flight

    def results(count: int) -> Generator[object, None, None]:
        yield from pool.each(_nothing, {str(number): number for number in range(count)}, "loop", lambda unit: Needs())

    with mock.patch.object(dispatch, "cpus_of", return_value=cpus):
        list(results(20))  # the workers have started
        before = _processor()
        began, used = time.monotonic(), time.process_time()
        done = sum(1 for _ in results(UNITS))
        seconds, cpu = time.monotonic() - began, time.process_time() - used
        workers_used, board_used = (after - one for one, after in zip(before, _processor(), strict=True))
        with contextlib.closing(results(UNITS)) as some:
            list(itertools.islice(some, 1000))
            ending = time.monotonic()
    return {
        "units in flight": in_flight,
        "units a second": round(done / seconds),
        "driver ms a unit": round(1000 * cpu / done, 2),
        "workers ms a unit": round(1000 * workers_used / done, 2),
        "board ms a unit": round(1000 * board_used / done, 2),
        "seconds to stop": round(time.monotonic() - ending, 2),
    }


def cluster(nodes: int, folder: Path) -> dict[str, Any]:
    """How a build ended on `nodes` raylets: two of them are killed, and three are unfit."""
    with _web_server(folder / "web") as url:
        config = _corpus_file(folder, f"{url}/*.parquet")
        undisturbed, output, other = folder / "undisturbed", folder / "output", folder / "other"
        output.mkdir()
        if _build(folder, config, f"output={undisturbed}", "ray.small_bytes=1000000000").wait():
            sys.exit((folder / "said").read_text())
        shutil.copytree(ROOT / "data_pipeline", other / "data_pipeline", ignore=shutil.ignore_patterns("__pycache__"))
        with (other / "data_pipeline/__init__.py").open("a") as file:
            file.write("# other code\n")
        unfit: list[tuple[str, Mapping[str, str]]] = [
            (f"mount -t tmpfs none {output}", {}),
            ("true", {"PYTHONPATH": str(other)}),
            ("mount -t tmpfs -o size=16k none /tmp", {}),
        ]
        os.environ |= {**_OPEN, "PYTHONPATH": str(ROOT)}
        free = [psutil.virtual_memory().available]
        with contextlib.ExitStack() as stack:
            # outside of /tmp, and with a short name: the paths of sockets have at most 107 characters
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/var/tmp"))
            settings = {"object_store_memory": 80_000_000, "include_dashboard": False}
            raylets = Cluster(initialize_head=True, head_node_args={"temp_dir": own, **settings})
            stack.callback(raylets.shutdown)
            plain = [
                raylets.add_node(node_ip_address=f"127.0.0.{number}", **settings) for number in range(2, nodes - 2)
            ]
            for number, (mount, variables) in enumerate(unfit, 1):
                stack.enter_context(_node(folder, str(raylets.address), f"127.0.1.{number}", mount, variables))
            began = time.monotonic()
            build = _build(folder, config, f"output={output}", f"ray.address={raylets.address}", "ray.small_bytes=0")
            for done in (FILES // 6, FILES // 2):
                while build.poll() is None and len([*output.rglob("documents/part-?????.parquet")]) < done:
                    free.append(psutil.virtual_memory().available)
                    time.sleep(0.1)
                raylets.remove_node(plain.pop(), allow_graceful=False)
            code = build.wait()
            seconds = round(time.monotonic() - began)
    said = (folder / "said").read_text().replace(str(folder), "").replace(socket.gethostname(), "HOST")
    told = [line for line in said.splitlines() if line.startswith(("warning", "error"))]
    named = sum(any(f"node 127.0.1.{number}" in line for line in told) for number in (1, 2, 3))
    differ = sorted({name for name, _ in checksums(output).items() ^ checksums(undisturbed).items()})
    row = {"raylets": nodes, "killed": 2, "unfit": 3, "named": named, "exit code": code}
    row |= {"seconds": seconds, "files that differ": len(differ)}
    return row | {
        "GB of memory": round((free[0] - min(free)) / 1e9, 1),
        "said": [*(told if not code else said.splitlines()), *(f"differs: {name}" for name in differ)],
    }


@contextlib.contextmanager
def _web_server(folder: Path) -> Iterator[str]:
    """The address of a server of the files in `folder`, which it makes."""
    folder.mkdir()
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    with subprocess.Popen(command, stdout=-1, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout
            yield "http://127.0.0.1:" + server.stdout.readline().split()[5]
        finally:
            server.kill()


@contextlib.contextmanager
def _node(folder: Path, head: str, address: str, mount: str, variables: Mapping[str, str]) -> Iterator[None]:
    """A raylet with a mount namespace of its own, in which `mount` has been done."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", f"--address={head}", f"--node-ip-address={address}"]
    ray += ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    ray += ["--min-worker-port=0", "--max-worker-port=0"]
    own = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*own, "sh", "-c", f'{mount}; exec "$@"', "sh", *ray]
    log = folder / f"{address}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **variables})
    try:
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def _corpus_file(folder: Path, remote: str) -> Path:
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as lines:
        records = [*lines]
    for number in range(FILES):
        own = [*itertools.islice(itertools.cycle(records), number * 7, number * 7 + RECORDS)]
        if number % 3 == 0:
            with gzip.open(folder / f"{number:03d}.json.gz", "wt", encoding="utf-8") as out:
                out.writelines(own)
        else:
            table = pa.Table.from_pylist([{key: json.loads(line)[key] for key in ("text", "url")} for line in own])
            pq.write_table(table, folder / f"web/{number:03d}.parquet", compression="none")
    config = {
        "name": "scale",
        "output": "",
        "sources": [
            {"format": "parquet", "path": remote, "language": "en"},
            {"format": "c4", "path": str(folder / "*.json.gz"), "language": "en"},
        ],
        "tokenizer": {"vocab_size": 500, "byte_fallback": False, "sentinels": 20},
        "rows": {"objective": {"name": "span_corruption", "inputs_length": 128}},
        "bytes_per_shared_unit": 0,
    }
    path = folder / "corpus.yaml"
    path.write_text(json.dumps(config))
    return path


def _build(folder: Path, config: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "data_pipeline", "build", str(config), *overrides]
    with (folder / "said").open("wb") as said:
        variables = {**os.environ, **_OPEN, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, stdout=said, stderr=said, cwd=folder, env=variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="keep the rows in docs/results/scale/")
    rows = parser.add_subparsers(dest="row", required=True)
    rows.add_parser("loop")
    rows.add_parser("cluster").add_argument("--nodes", type=int, default=20)
    asked = parser.parse_args()
    if asked.row == "loop":
        code = scale_rows.code()
        for in_flight in IN_FLIGHT:
            when = scale_rows.circumstances()
            row = {"code": code, **loop(in_flight), **when}
            print(json.dumps(row), flush=True)
            if asked.save:
                scale_rows.save("loop.csv", row, ["code", "units in flight"])
    else:
        when = scale_rows.circumstances()
        with tempfile.TemporaryDirectory(prefix="scale-", dir="/var/tmp") as folder:
            row = cluster(asked.nodes, Path(folder)) | when
        print(json.dumps(row, indent=1))
        if asked.save:
            told: Any = row.pop("said")
            scale_rows.save("cluster.csv", row, ["raylets"])
            (scale_rows.FOLDER / "cluster.log").write_text("".join(f"{line}\n" for line in told))


if __name__ == "__main__":
    main()
