"""How fast is each reader and each cleaning rule on one core, and which is the slowest?

    python benchmarks/cleaning_speed.py [--seconds 2] [--json FILE]
    python benchmarks/cleaning_speed.py --build 20 [--shards] [--rounds 5] [--beside CHECKOUT] [--json FILE]
    python benchmarks/cleaning_speed.py --build 20 --keep-dropped [--wikipedia DUMPS] [--rounds 5] [--json FILE]

Runs on the real text that ships with the package and its tests. MB count the uncompressed input, and seconds are the
processor's. The classifier has the words of the text, vectors of 100 numbers drawn at random and a million buckets for
pairs of words, as large models have.

`--build`: C4's rules with fast language and bad words, and its three steps of deduplication, on so many MB of a WET
archive, up to the documents or to the shards: each stage's seconds, and those of the whole command. With another
checkout, builds of both take turns, and their files are compared.

`--keep-dropped`: what the tables of dropped documents cost, which builds write by default. Builds with the tables and
without them take turns, of the WET archive and of Wikipedia's dumps. Rules and deduplication of Wikipedia are those of
configs/corpora/enwik8.yaml.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import truediv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import ROOT, Json, Options, Table, main
from pii.patterns import PLACEHOLDERS, mask
from wet_files import write_wet

import data_pipeline
from data_pipeline.dedup.decontamination import DecontaminationConfig, Ngrams
from data_pipeline.dedup.substrings import Anchors, EqualSubstrings
from data_pipeline.sources import formats
from data_pipeline.sources.decompress import open_stream
from data_pipeline.sources.record import Input, ReadStats, Record
from data_pipeline.text.cleaning.bad_words import contains_bad_word
from data_pipeline.text.cleaning.classifier import ClassifierConfig, scorer
from data_pipeline.text.cleaning.gopher import GopherConfig, broken_rule
from data_pipeline.text.cleaning.language import detector
from data_pipeline.text.cleaning.page import CleanPage, clean_page
from data_pipeline.text.document import Document, Tally, normalize_url
from data_pipeline.text.sentences import count_sentences
from data_pipeline.text.wikitext.markup import plain_text

LIMIT = """Each step is Python on one core, for each page, line or word; a build has a core for each worker."""
SAMPLES = Path(data_pipeline.__file__).parent / "samples"
FIXTURES = Path(__file__).parent.parent / "tests" / "data" / "commoncrawl"
FILES = {
    "wikipedia": SAMPLES / "enwiki-20060303-pages-articles1.xml.bz2",
    "c4": SAMPLES / "c4-train.00000-of-01024-first1000.json.gz",
    "warc": FIXTURES / "CC-MAIN-20140820021334-00006.warc",
}


def read(source: str, path: Path) -> list[Record]:
    return list(formats.read(source, Input(str(path)), ReadStats()))


def size(path: Path) -> int:
    with open_stream(str(path)) as stream:
        return len(stream.read())


def numbered(pages: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each page with a URL of its own."""
    return ((f"https://example.org/{number}", page) for number, page in enumerate(pages))


def speed(work: Callable[[], object], total_bytes: int, seconds: float) -> float:
    """MB per second of the processor, of the best run within `seconds`, after a warm-up run."""
    work()
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.process_time()
        work()
        best = max(best, total_bytes / 1e6 / (time.process_time() - started))
    return best


def write_classifier(path: Path, texts: list[str]) -> None:
    """Writes a fastText classifier that knows the words of `texts` and pairs of words; its numbers are random."""
    dimensions, buckets = 100, 1_000_000
    words = ["</s>", *Counter(word for text in texts for word in text.split())]
    labels = ["__label__keep", "__label__drop"]
    magic, version, softmax, supervised, pairs = 793_712_314, 12, 3, 3, 2
    settings = [dimensions, 5, 5, 1, 5, pairs, softmax, supervised, buckets, 0, 0, 100]
    content = struct.pack("<2i12id", magic, version, *settings, 1e-4)
    content += struct.pack("<3i2q", len(words) + 2, len(words), 2, len(words), -1)
    for names, kind in ((words, 0), (labels, 1)):
        content += b"".join(name.encode() + b"\0" + struct.pack("<qb", 5, kind) for name in names)
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(content)
        for rows in (len(words) + buckets, len(labels)):
            file.write(struct.pack("<?2q", False, rows, dimensions))
            file.write(random.standard_normal((rows, dimensions), dtype="f4").tobytes())


def over(texts: Iterable[str], rule: Callable[[str], object]) -> Callable[[], object]:
    texts = list(texts)
    return lambda: [rule(text) for text in texts]


def decontamination(texts: list[str]) -> Callable[[list[str]], object]:
    """Looks for 10,000 passages of other texts."""
    passages = [text[at : at + 300] for text in texts for at in range(0, len(text), 300)][:10_000]
    ngrams = Ngrams.of(enumerate(passages), DecontaminationConfig())
    return lambda pages: list(ngrams.matches(enumerate(pages)))


def rows(pages: list[str]) -> Iterable[tuple[int, Document]]:
    return ((number, Document(str(number), text)) for number, text in enumerate(pages))


def anchors(pages: list[str]) -> object:
    return list(Anchors().tables(rows(pages)))


def substrings(pages: list[str]) -> object:
    return list(EqualSubstrings().tables(rows(pages)))


def crawl(pages: list[str], size: int) -> list[str]:
    """Pages of `size` bytes in all: the given ones in turn, between short lines without a full stop.

    In all but each tenth page, a word of each line is another one, so that the lines are no duplicates.
    """
    chance, words = random.Random(0), sorted({word for page in pages for word in page.split() if word.isalpha()})
    made: list[str] = []
    while size > 0:
        lines = pages[len(made) % len(pages)].split("\n")
        if len(made) % 10:
            for number, line in enumerate(lines):
                own = line.split(" ")
                own[chance.randrange(len(own) + 1) // 2] = chance.choice(words)
                lines[number] = " ".join(own)
        menu = [" ".join(chance.choices(words, k=3)).title() for _ in range(10)]
        made.append("\n".join([*menu[:6], *lines, *menu[6:]]))
        size -= len(made[-1].encode())
    return made


class Built(NamedTuple):
    """Core-seconds of the command and of each stage; the sha256 of each file that the corpus consists of; the bytes of
    all files of the corpus's folder, and of its tables of dropped documents."""

    command: float
    stages: dict[str, float]
    files: dict[str, str]
    bytes: int
    dropped_bytes: int


def built(checkout: Path, what: str, settings: Json) -> Built:
    """What the command `what` of `checkout` does with `settings` of a corpus, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        config = {
            "name": "crawl",
            "output": str(corpus),
            "tokenizer": {"vocab_size": 8000, "sample_bytes": 1_000_000},
            "ray": {"small_bytes": 10**15},
            **settings,
        }
        (Path(folder) / "corpus.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "data_pipeline", what, f"{folder}/corpus.yaml"]
        before = os.times()
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run(command, check=True, capture_output=True, env=environment, cwd=checkout)
        after = os.times()
        used = sum(after[2:4]) - sum(before[2:4])
        stages = {
            path.parent.name: sum(json.loads(line)["seconds"] for line in path.read_text().splitlines())
            for path in sorted(corpus.glob(".stages/*/finished.jsonl"), key=lambda path: path.stat().st_mtime)
        }
        files = {
            str(path.relative_to(corpus)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in corpus.rglob("*")
            if path.suffix in (".parquet", ".safetensors", ".tar", ".model")
        }
        sizes = {path: path.stat().st_size for path in corpus.rglob("*") if path.is_file()}
        dropped = sum(size for path, size in sizes.items() if path.is_relative_to(corpus / "dropped"))
        return Built(used, stages, files, sum(sizes.values()), dropped)


def in_turns(sides: Mapping[str, Callable[[], Built]], rounds: int) -> dict[str, list[Built]]:
    """The builds of each side, in the order of the rounds. Every other round has the reversed order of sides."""
    made: dict[str, list[Built]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            made[name].append(sides[name]())
    return made


def crawl_source(folder: str, megabytes: int) -> Json:
    """A source of so many MB, whose archive is written to `folder`."""
    archive = Path(folder) / "crawl.warc.wet.gz"
    write_wet(archive, numbered(crawl([record.text for record in read("c4", FILES["c4"])], megabytes * 10**6)))
    return {"format": "wet", "path": str(archive)}


def builds(given: argparse.Namespace) -> Iterator[Table]:
    sides = {"here": ROOT} | ({"beside": given.beside.resolve()} if given.beside else {})
    with tempfile.TemporaryDirectory() as folder:
        settings, what = {"sources": [crawl_source(folder, given.build)]}, "build" if given.shards else "documents"
        made = in_turns({name: partial(built, of, what, settings) for name, of in sides.items()}, given.rounds)
    columns = ["stage", *(f"{what}, {name}" for name in sides for what in ("core-seconds", "MB per core-second"))]
    table = Table(f"A build of {given.build} MB in one process, medians of {given.rounds}", columns)
    for stage in ("the command", *made["here"][0].stages):
        samples = {
            name: [one.command if stage == "the command" else one.stages.get(stage, 0.0) for one in ran]
            for name, ran in made.items()
        }
        medians = [statistics.median(taken) for taken in samples.values()]
        cells = [cell for taken in medians for cell in (f"{taken:.2f}", f"{given.build / taken:,.1f}" if taken else "")]
        table.add(stage, *cells, stage=stage, seconds=samples)
    if given.beside:
        pairs = zip(made["beside"], made["here"], strict=True)
        ratio = statistics.median(theirs.command / ours.command for theirs, ours in pairs)
        table.add("the command, times as fast", f"{ratio:.3f}", *[""] * 3)
        files, others = made["here"][0].files, made["beside"][0].files
        differ = sorted(name for name in files | others if files.get(name) != others.get(name))
        table.add(f"files that differ, of {len(files)}", " ".join([str(len(differ)), *differ]), *[""] * 3)
    yield table


def cost_of_dropped(given: argparse.Namespace) -> Iterator[Table]:
    columns = ["corpus", "core-seconds, with", "core-seconds, without", "times as long", "MB, with", "MB, without"]
    title = f"Tables of dropped documents: builds in one process, medians of {given.rounds}"
    table = Table(title, [*columns, "MB of the tables"])
    sides, what = {"with": True, "without": False}, "build" if given.shards else "documents"
    with tempfile.TemporaryDirectory() as folder:
        corpora: dict[str, Json] = {
            f"WET, {given.build} MB of text": {"sources": [crawl_source(folder, given.build)]},
            "Wikipedia": {
                "sources": [{"format": "wikipedia", "language": "en", "path": str(given.wikipedia.resolve())}],
                "cleaning": {"profile": "wikipedia"},
                "dedup": {"urls": "newest", "lines": False, "spans": False, "documents": True, "minhash": False},
            },
        }
        for name, settings in corpora.items():
            kept = {side: {**settings, "keep_dropped": keep} for side, keep in sides.items()}
            made = in_turns({side: partial(built, ROOT, what, own) for side, own in kept.items()}, given.rounds)
            seconds = {side: [one.command for one in ran] for side, ran in made.items()}
            ratio = statistics.median(map(truediv, *seconds.values()))
            sizes = {side: ran[0].bytes for side, ran in made.items()}
            tables = made["with"][0].dropped_bytes
            medians = [f"{statistics.median(taken):.2f}" for taken in seconds.values()]
            megabytes = [f"{size / 1e6:.2f}" for size in (*sizes.values(), tables)]
            cells = [*medians, f"{ratio:.3f}", *megabytes]
            table.add(name, *cells, corpus=name, seconds=seconds, bytes=sizes, tables=tables)
    yield table


def measure(options: Options) -> Iterator[Table]:
    given, seconds = options.arguments, options.seconds
    if given.build:
        yield from (cost_of_dropped if given.keep_dropped else builds)(given)
        return
    records = {source: read(source, path) for source, path in FILES.items()}
    pages = [record.text for record in records["c4"]]
    page_bytes = sum(len(text.encode()) for text in pages)
    wikitexts = [record.text for record in records["wikipedia"]]
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        wet = Path(folder) / "wet"
        write_wet(wet, numbered(f"{page}\n{other}" for page, other in zip(pages, reversed(pages), strict=True)))
        for source, path in {**FILES, "wet": wet}.items():
            results[f"read {source}"] = speed(partial(read, source, path), size(path), seconds)
    results["wikitext to text"] = speed(
        over(wikitexts, plain_text), sum(len(text.encode()) for text in wikitexts), seconds
    )
    rules: dict[str, Callable[[str], object]] = {
        "C4's lines and pages": lambda text: clean_page(text, CleanPage(), Tally()),
        "sentences (all of a page)": count_sentences,
        "bad words, English": lambda text: contains_bad_word(text, "en"),
        "language, fast": detector("fast"),
        "Gopher's rules": lambda text: broken_rule(text, GopherConfig()),
        "personal data": lambda text: mask(text, PLACEHOLDERS, Tally()),
    }
    with tempfile.TemporaryDirectory() as folder:
        classifier = Path(folder) / "model.bin"
        write_classifier(classifier, pages)
        rules["classifier"] = scorer(ClassifierConfig(path=str(classifier), label="keep"))
    for name, rule in rules.items():
        results[name] = speed(over(pages, rule), page_bytes, seconds)
    results["decontamination (10,000 items)"] = speed(partial(decontamination(wikitexts), pages), page_bytes, seconds)
    results["anchors of substrings"] = speed(partial(anchors, pages), page_bytes, seconds)
    results["substrings, if all text is repeated"] = speed(partial(substrings, pages), page_bytes, seconds)
    few = pages[:40]
    results["language, langdetect"] = speed(
        over(few, detector("langdetect")), sum(len(text.encode()) for text in few), seconds
    )
    urls = [record.url for record in records["c4"]]
    results["URL normalisation (of the text's MB)"] = speed(over(urls, normalize_url), page_bytes, seconds)

    table = Table("One core, real text", ["step", "MB/s per core"])
    for name, rate in sorted(results.items(), key=lambda item: item[1]):
        table.add(name, f"{rate:,.1f}", rate=rate)
    yield table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", type=int, metavar="MB", help="measure a build of so many MB of text instead")
    parser.add_argument("--shards", action="store_true", help="build up to the shards, not the documents")
    parser.add_argument("--keep-dropped", action="store_true", help="compare with builds without tables of documents")
    parser.add_argument("--wikipedia", type=Path, default=SAMPLES / "enwiki-*.xml.bz2", metavar="DUMPS", help="a glob")
    parser.add_argument("--rounds", type=int, default=5, help="how often each side builds")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="compare with the code of another checkout")


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
