"""How do the time, memory and files of a build scale with the size of the text and the number of workers?

    python benchmarks/corpus_scaling.py [--formats c4 published wet] [--megabytes 1000] [--workers 1 2] [--folder DIR]

Corpora are built from published C4 and from WET, with the default settings: all rules, deduplication of URLs, lines and
documents, and a tokenizer of 32,000 pieces trained on the default sample. `published` is C4 as
configs/corpora/c4-published.yaml takes it, without the rules that it has been through.

The text is the sample of C4 that ships with the package, repeated. In each copy the URLs are others, and so is the
first word of each line and every thirteenth one after it. So no page or line has a duplicate, and new words occur as
often as in a real text of the size (Heaps' law). Pages of WET have a menu above the text, and its lines are dropped.
Files have about 10 MB of text.

Seconds and core-seconds are those of the whole command with all its processes, Ray's own included. Memory is the sum of
the proportional set sizes (PSS) of all processes.
"""

import argparse
import gzip
import json
import random
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import data_pipeline

SAMPLES = Path(data_pipeline.__file__).parent / "samples"
CONFIGS = Path(__file__).parent.parent / "configs/corpora"
FILE_BYTES = 10_000_000
CHANGED = 13  # of so many words, one is another in each copy
MENU = "Home\nAbout us\nContact\nSign in | Register\nShopping cart (0)\nPrivacy\nMost read this week\nShare on\n"


class Page:
    """A page of C4, in pieces of which every other one is a word that changes from copy to copy."""

    def __init__(self, record: dict[str, str]):
        self.url, self._timestamp = record["url"], record["timestamp"]
        self._fixed, self._words = [""], []
        for line in record["text"].split("\n"):
            for place, word in enumerate(line.split(" ")):
                if place % CHANGED == 0:
                    self._words.append(word)
                    self._fixed.append("")
                else:
                    self._fixed[-1] += f" {word}"
                if place % CHANGED == CHANGED - 1:
                    self._fixed[-1] += " "
            self._fixed[-1] += "\n"

    def copy(self, number: int, letters: dict[int, int]) -> dict[str, str]:
        words = "\0".join(self._words).translate(letters).split("\0")
        text = "".join(piece for pair in zip(self._fixed, [*words, ""], strict=True) for piece in pair)
        host, _, path = self.url.removeprefix("http://").removeprefix("https://").partition("/")
        return {"text": text.rstrip(), "url": f"https://{host}/{number}/{path}", "timestamp": self._timestamp}


def other_letters(number: int) -> dict[int, int]:
    """A substitution of letters that belongs to a copy. Copy 0 is the text itself."""
    letters = list(string.ascii_lowercase)
    if number:
        random.Random(number).shuffle(letters)
    mixed = "".join(letters)
    return str.maketrans(string.ascii_lowercase + string.ascii_uppercase, mixed + mixed.upper())


def as_c4(page: dict[str, str]) -> bytes:
    return (json.dumps(page, ensure_ascii=False) + "\n").encode()


def as_wet(page: dict[str, str]) -> bytes:
    content = (MENU + page["text"]).encode()
    head = (
        "WARC/1.0\r\nWARC-Type: conversion\r\n"
        f"WARC-Target-URI: {page['url']}\r\nWARC-Date: {page['timestamp']}\r\n"
        f"WARC-Record-ID: <urn:uuid:{random.Random(page['url']).getrandbits(128):032x}>\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"


FORMATS: dict[str, Callable[[dict[str, str]], bytes]] = {"c4": as_c4, "published": as_c4, "wet": as_wet}


def write_text(folder: Path, kind: str, total_bytes: int) -> int:
    """Writes gz files of the format; returns the bytes of their text."""
    (sample,) = SAMPLES.glob("c4-*.json.gz")
    with gzip.open(sample, "rt", encoding="utf-8") as lines:
        pages = [Page(json.loads(line)) for line in lines]

    def copies() -> Iterator[dict[str, str]]:
        number = 0
        while True:
            letters = other_letters(number)
            yield from (page.copy(number, letters) for page in pages)
            number += 1

    written = 0
    copied = copies()
    for number in range(-(-total_bytes // FILE_BYTES)):
        size, wanted = 0, min(FILE_BYTES, total_bytes - written)
        with gzip.open(folder / f"part-{number:05d}.gz", "wb", compresslevel=6 if kind == "wet" else 1) as out:
            while size < wanted:
                page = next(copied)
                out.write(FORMATS[kind](page))
                size += len(page["text"].encode())
        written += size
    return written


class Meter(threading.Thread):
    """Watches a process and all its descendants: peak memory in bytes, and the processor's time in seconds."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.peak = 0
        self._used: dict[psutil.Process, float] = {}
        self._process = psutil.Process(pid)

    @property
    def core_seconds(self) -> float:
        return sum(self._used.values())

    def run(self) -> None:
        while self._process.is_running():
            total = 0
            try:
                family = [self._process, *self._process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for member in family:
                try:
                    total += proportional_set(member.pid)
                    times = member.cpu_times()
                    self._used[member] = times.user + times.system
                except (psutil.Error, OSError):
                    continue
            self.peak = max(self.peak, total)
            time.sleep(1)


def proportional_set(pid: int) -> int:
    """PSS of a process, in bytes. psutil reads it mapping by mapping, which took a fifth of a core."""
    (line,) = (line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


@dataclass
class Build:
    """What a build took."""

    seconds: float
    core_seconds: float
    peak: int
    files: int
    stages: list[dict[str, float]]


def build(folder: Path, kind: str, output: Path, workers: int) -> Build:
    source = {"format": "wet"} if kind == "wet" else {"format": "c4", "language": "en"}
    config = {
        "extends": [str(CONFIGS / "c4-published.yaml")] if kind == "published" else [],
        "name": "scaling",
        "output": str(output),
        "sources": [{**source, "path": str(folder / "*.gz")}],
        "ray": {"num_cpus": workers},
    }
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(config))
    started = time.perf_counter()
    with output.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "data_pipeline", "build", str(path)], stdout=log, stderr=subprocess.STDOUT
        )
        meter = Meter(process.pid)
        meter.start()
        if process.wait() != 0:
            raise SystemExit(f"the build failed:\n{output.with_suffix('.log').read_text()[-2000:]}")
    seconds = time.perf_counter() - started
    files = sum(path.is_file() for path in output.rglob("*"))
    stages = json.loads((output / "report.json").read_text())["stages"]
    return Build(seconds, meter.core_seconds, meter.peak, files, stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="folder for the text and the corpora (default: a temporary one)")
    arguments = parser.parse_args()
    header = ["text MB", "workers", "seconds", "times faster", "core-seconds", "MB/s", "MB per core-second"]
    builds = Table("from", *header, "peak GB", "files", title="whole builds, tokenizer's training included")
    keys = ("core_seconds", "megabytes_per_core_second", "seconds", "idle_seconds", "ray_start_seconds")
    stages = Table("from", "text MB", "workers", "stage", *(key.replace("_", " ") for key in keys), title="stages")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        for kind in arguments.formats:
            for megabytes in arguments.megabytes:
                folder = Path(temporary) / f"{kind}-{megabytes}"
                folder.mkdir()
                text = write_text(folder, kind, megabytes * 1_000_000) / 1e6
                first = 0.0
                for workers in arguments.workers:
                    found = build(folder, kind, folder.with_name(f"{folder.name}-by-{workers}"), workers)
                    first = first or found.seconds
                    figures = [found.core_seconds, text / found.seconds, text / found.core_seconds, found.peak / 1e9]
                    shown = [f"{figures[0]:.0f}", *(f"{figure:.2f}" for figure in figures[1:]), f"{found.files:,}"]
                    size = [kind, f"{text:,.0f}", str(workers)]
                    builds.add_row(*size, f"{found.seconds:.0f}", f"{first / found.seconds:.2f}", *shown)
                    for stage in found.stages:
                        stages.add_row(*size, str(stage["name"]), *(str(stage.get(key, "")) for key in keys))
                    Console().print(builds, stages)


if __name__ == "__main__":
    main()
