"""Throws damaged input at every reader and at the cleaner: no crash, no hang, no silent loss.

    python -m checks.fuzz [--cases 100000] [--seed 0] [--jobs 2] [--only wikipedia]

A case is a small real file, damaged (cut, bits flipped, bytes overwritten or repeated, mis-encoded, absurdly long),
before or after compression. What must hold for each:

- the reader ends, within seconds, and raises nothing but DamagedInput, or UserError for a table's damaged columns;
- every record read is yielded or counted under the rule that dropped it;
- a compressed file that was cut or changed gives the records it had, or says that it is damaged;
- what is yielded can be stored, cleaned and stored again.

A case is a function of (seed, number): `--first N --cases 1` repeats one.
"""

import argparse
import bz2
import gzip
import io
import itertools
import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.sources import formats
from data_pipeline.sources.decompress import open_stream
from data_pipeline.sources.record import Input, ReadStats, Record
from data_pipeline.text.cleaning.config import CleaningConfig
from data_pipeline.text.document import Document, Tally
from data_pipeline.text.step import cleaned
from data_pipeline.text.wikitext.markup import plain_text

DATA = Path(__file__).parents[1] / "tests/data"
_SECONDS_PER_CASE = 20
_UNPACKED = ("parquet", "arrow")  # formats that are read as they are stored
_WITH_COLUMNS = (*_UNPACKED, "csv")


@dataclass(frozen=True)
class Seed:
    """A file to damage: its format, its uncompressed bytes, and the options for its reader."""

    format: str
    content: bytes
    options: tuple[tuple[str, str], ...] = ()


@cache
def seeds() -> list[Seed]:
    """Real files, cut to at most 20 kB where a format allows it."""
    found = [Seed("c4", b"".join(_content(path).splitlines(True)[:6])) for path in sorted(DATA.glob("c4/*.json*"))]
    found += [Seed("wikipedia", _content(path)[:60_000]) for path in sorted(DATA.glob("wikipedia/*.xml*"))]
    found += [Seed("wet", _content(path)) for path in sorted(DATA.glob("commoncrawl/*.wet*"))]
    found += [
        Seed("warc", _content(path))
        for path in sorted(DATA.glob("commoncrawl/*.warc")) + sorted(DATA.glob("commoncrawl/*.warc.gz"))
    ]
    text = (
        b'First line of text, with "quotes".\nSecond line: \xc3\xa9t\xc3\xa9, \xe2\x82\xac 5.\n\nA new paragraph.\n' * 8
    )
    found += [Seed("text", text, (("sample_by", unit),)) for unit in ("line", "paragraph", "document")]
    found.append(
        Seed("jsonl", b'{"text": "Some text.", "url": "https://a.org/1"}\n{"text": "More \\u00e9 text."}\n' * 8)
    )
    found.append(Seed("pairs", b"translate: a house\tein Haus\ntranslate: a tree\tein Baum\n" * 8))
    found.append(Seed("pairs", b'{"inputs": "a house", "targets": "ein Haus"}\n' * 8))
    found.append(
        Seed(
            "wikiextractor",
            b'<doc id="12" url="https://en.wikipedia.org/wiki?curid=12" title="Ulm">\nUlm\n\nUlm is a city.\n</doc>\n'
            * 6,
        )
    )
    found.append(Seed("fasta", b">sp|P1|A_HUMAN Some protein\nMKTAYIAKQR\nQISFVK*\n>P2\n>P3\nmktayiak\n" * 8))
    return [*found, *_tables()]


def damaged(generator: random.Random, content: bytes) -> bytes:
    """`content` after one to three kinds of damage."""
    for _ in range(generator.choice((1, 1, 2, 3))):
        content = generator.choice(_DAMAGES)(generator, content)
    return content


def check(seed: int, number: int, only: str | None = None) -> str:
    """Runs one case; returns its format. Raises AssertionError, or any other error that a reader shouldn't have
    raised."""
    generator = random.Random(f"{seed}/{number}")
    base = generator.choice([base for base in seeds() if only in (None, base.format)])
    compress = generator.choice(_COMPRESSIONS if base.format not in _UNPACKED else _COMPRESSIONS[:1])
    after = compress is not _plain and generator.random() < 0.5
    if after:
        stored = generator.choice((_cut, _flip, _overwrite))(generator, compress(base.content))
    else:
        stored = compress(damaged(generator, base.content))
    records, stats, stopped = _read(base, stored)
    if base.format != "parquet":  # an unreadable row group is lost as a whole, and noted as such
        noted = stats.counters.dropped_documents["damaged"]
        dropped = stats.counters.dropped_documents.total() - noted
        accounted = len(records) + dropped
        # if a file ends in damage, the record there was read too
        assert accounted <= stats.counters.read <= accounted + noted + stopped, stats.counters
    whole = compress(base.content)
    if after and stored[:4] == whole[:4] and not stopped and not stats.damage:  # still known for an archive
        original, _, _ = _read(base, whole)
        assert records == original, "a changed archive gave other records without a word"
    for record in records:
        _clean(base.format, record)
    return base.format


def _read(base: Seed, stored: bytes) -> tuple[list[Record], ReadStats, bool]:
    path = f"memory://fuzz/{multiprocessing.current_process().pid}"
    with fsspec.open(path, "wb") as file:
        file.write(stored)
    stats = ReadStats()
    records: list[Record] = []
    try:
        records.extend(formats.read(base.format, Input(path, options=dict(base.options)), stats))
    except DamagedInput:
        return records, stats, True
    except UserError:  # of a damaged schema or header
        if base.format not in _WITH_COLUMNS:
            raise
        return records, stats, True
    return records, stats, False


_CLEANING = CleaningConfig()
_RULES = [*_CLEANING.of_pages, *_CLEANING.of_what_is_left]


def _clean(source: str, record: Record) -> None:
    text = record.text
    if source == "wikipedia":
        text = plain_text(text, record.title, record.hidden_namespaces, record.timestamp)
    kept = cleaned(Document(text=text, url=record.url, language=record.language), _RULES, Tally())
    for value in (record.text, record.url, record.title, record.timestamp, record.language, record.target, text):
        value.encode()
    if kept is not None:
        kept.text.encode()


def _cut(generator: random.Random, content: bytes) -> bytes:
    return content[: generator.randrange(len(content) + 1)]


def _cut_out(generator: random.Random, content: bytes) -> bytes:
    start = generator.randrange(len(content) + 1)
    return content[:start] + content[start + generator.randrange(1, 400) :]


def _flip(generator: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(generator.choice((1, 1, 3, 30))):
        if changed:
            changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _overwrite(generator: random.Random, content: bytes) -> bytes:
    start = generator.randrange(len(content) + 1)
    noise = generator.randbytes(generator.choice((1, 16, 300)))
    return content[:start] + noise + content[start + len(noise) :]


def _insert(generator: random.Random, content: bytes) -> bytes:
    start = generator.randrange(len(content) + 1)
    token = generator.choice(_TOKENS)
    return content[:start] + token * generator.choice((1, 1, 5, 2000)) + content[start:]


def _repeat(generator: random.Random, content: bytes) -> bytes:
    start = generator.randrange(len(content) + 1)
    part = content[start : start + generator.randrange(1, 2000)]
    return content[:start] + part * generator.choice((2, 10)) + content[start:]


def _misencode(generator: random.Random, content: bytes) -> bytes:
    text = content.decode(errors="replace")
    return text.encode(generator.choice(("utf-16", "utf-16-be", "latin-1", "utf-8-sig", "utf-32")), errors="replace")


_TOKENS = [
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\x85", b"\xe2\x80\xa8", b'"', b"\\", b"{", b"[", b"\t", b"\n\n"),
    *(b"{{", b"[[", b"<ref>", b"</page>", b"<page>", b"<!--", b"{|", b"'''", b"&#xD800;", b"<![CDATA[", b"]]>"),
    *(b"WARC/1.0\r\n", b"Content-Length: 99999999999\r\n", b"</doc>", b"<doc ", b"\r\n\r\n", b"a" * 1000),
]
_DAMAGES: list[Callable[[random.Random, bytes], bytes]] = [
    *(_cut, _cut_out, _flip, _overwrite, _insert, _insert, _repeat, _misencode)
]


def _plain(content: bytes) -> bytes:
    return content


_COMPRESSIONS: list[Callable[[bytes], bytes]] = [
    _plain,
    lambda content: gzip.compress(content, 1, mtime=0),
    bz2.compress,
    zstandard.ZstdCompressor(write_checksum=True).compress,
]


def _content(path: Path) -> bytes:
    with open_stream(str(path)) as stream:
        return stream.read()


def _tables() -> Iterator[Seed]:
    """A table in each format that has columns, and in both forms of Arrow."""
    rows = [{"text": f"Text number {n}.", "url": f"https://a.org/{n}"} for n in range(40)]
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    pq.write_table(table, out, row_group_size=10, write_page_checksum=True)
    yield Seed("parquet", out.getvalue())
    for begin in (pa.ipc.new_stream, pa.ipc.new_file):
        out = io.BytesIO()
        with begin(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
        yield Seed("arrow", out.getvalue())
    yield Seed("csv", b"text,url\n" + b'"One, ""two"".\nThree.",https://a.org/1\nFour.,https://a.org/2\n' * 8)


def _worker(task: tuple[int, int, str | None]) -> tuple[int, str, str]:
    """(number, format, failure) of a case."""
    seed, number, only = task
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(_SECONDS_PER_CASE)
    try:
        return number, check(seed, number, only), ""
    except BaseException as error:  # any error is a finding
        return number, "", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        signal.alarm(0)


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"not done after {_SECONDS_PER_CASE} s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m checks.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--only", choices=sorted(formats.FORMATS))
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.cases)
    tasks = zip(itertools.repeat(arguments.seed), numbers, itertools.repeat(arguments.only))
    done: Counter[str] = Counter()
    failures, started = 0, time.monotonic()
    with multiprocessing.Pool(arguments.jobs, maxtasksperchild=20_000) as pool:
        for count, (number, source, failure) in enumerate(pool.imap_unordered(_worker, tasks, chunksize=50), 1):
            done[source] += not failure
            if failure:
                failures += 1
                print(f"case {number}: {failure}", flush=True)
            if count % 5000 == 0:
                print(f"{count:,} cases, {time.monotonic() - started:.0f} s, {failures} failures", flush=True)
    print(f"{sum(done.values()):,} cases passed, {failures} failed: {dict(sorted(done.items()))}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
