"""How do the memory, files and speed of a build scale with the size of the text and the number of workers?

    python benchmarks/corpus_scaling.py [--megabytes 10 100 1000] [--workers 2] [--one-file] [--folder DIR]

The text is the sample that ships with the package, repeated with every line changed, in files of about 10 MB or in one
file that can't be split. The build runs all stages and deduplicates lines and documents; the tokenizer has 8,000 pieces
and the default sample. Memory is the sum of the proportional set sizes (PSS) of all processes.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import data_pipeline
from data_pipeline.cleaning.wikitext.markup import plain_text
from data_pipeline.sources import READERS, Input, Intake

SAMPLES = Path(data_pipeline.__file__).parent / "samples"
FILE_BYTES = 10_000_000


def sample_texts() -> list[str]:
    dumps = sorted(SAMPLES.glob("enwiki-*.bz2"))
    articles = [record for dump in dumps for record in READERS["wikipedia"](Input(str(dump)), Intake())]
    (c4,) = SAMPLES.glob("c4-*.json.gz")
    return [plain_text(record.text) for record in articles] + [
        record.text for record in READERS["c4"](Input(str(c4)), Intake())
    ]


def write_text(folder: Path, total_bytes: int, one_file: bool) -> int:
    """Writes files of JSON lines, or one file of several gzip members; returns the bytes of their text."""
    texts = sample_texts()
    written = number = 0
    while written < total_bytes:
        size = 0
        path = folder / f"part-{0 if one_file else number:05d}.json.gz"
        with gzip.open(path, "at", compresslevel=1, encoding="utf-8") as out:
            for text in texts:
                changed = "\n".join(f"{line} {number}" for line in text.splitlines())
                out.write(json.dumps({"text": changed}, ensure_ascii=False) + "\n")
                size += len(changed.encode())
                if size >= min(FILE_BYTES, total_bytes - written):
                    break
        written, number = written + size, number + 1
    return written


class PeakMemory(threading.Thread):
    """Watches a process and all its descendants; `peak` is in bytes."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.peak = 0
        self._process = psutil.Process(pid)

    def run(self) -> None:
        while self._process.is_running():
            total = 0
            try:
                family = [self._process, *self._process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for member in family:
                try:
                    total += member.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)
            time.sleep(0.5)


def build(folder: Path, output: Path, workers: int) -> tuple[float, int]:
    """Builds a corpus; returns seconds and peak bytes."""
    config = {
        "name": "scaling",
        "output": str(output),
        "sources": [{"format": "jsonl", "path": str(folder / "*.json.gz"), "language": "en"}],
        "cleaning": {"profile": "none"},
        "tokenizer": {"vocab_size": 8000},
        "ray": {"num_cpus": workers},
    }
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(config))
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "data_pipeline", "build", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    memory = PeakMemory(process.pid)
    memory.start()
    if process.wait() != 0:
        raise SystemExit(f"the build of {path} failed")
    return time.perf_counter() - started, memory.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--one-file", action="store_true", help="all text in one file")
    parser.add_argument("--folder", type=Path, help="folder for the text and the corpora (default: a temporary one)")
    arguments = parser.parse_args()
    sizes = Table("text MB", "workers", "seconds", "peak GB", "files", title="whole builds")
    stages = Table("text MB", "workers", "stage", "core-seconds", "MB per core-second", title="stages")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        for megabytes in arguments.megabytes:
            folder = Path(temporary) / f"text-{megabytes}"
            folder.mkdir()
            text = write_text(folder, megabytes * 1_000_000, arguments.one_file) / 1e6
            for workers in arguments.workers:
                output = Path(temporary) / f"corpus-{megabytes}-{workers}"
                seconds, peak = build(folder, output, workers)
                files = sum(path.is_file() for path in output.rglob("*"))
                sizes.add_row(f"{text:,.0f}", str(workers), f"{seconds:.0f}", f"{peak / 1e9:.2f}", f"{files:,}")
                for stage in json.loads((output / "report.json").read_text())["stages"]:
                    rate = stage["megabytes_per_core_second"]
                    row = [f"{text:,.0f}", str(workers), stage["name"], str(stage["core_seconds"]), f"{rate}"]
                    stages.add_row(*row)
    Console().print(sizes, stages)


if __name__ == "__main__":
    main()
