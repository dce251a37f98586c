"""The samples that ship with the package: real text, and a task."""

import json
import random
import re
from itertools import product
from pathlib import Path

from data_pipeline.sources.decompress import open_stream
from tests.conftest import C4_SAMPLE, SAMPLES


def content(path: Path) -> bytes:
    with open_stream(str(path)) as stream:
        return stream.read()


def test_the_sample_of_c4_has_the_published_layout():
    records = list(map(json.loads, content(C4_SAMPLE).decode().splitlines()))
    assert {tuple(record) for record in records} == {("text", "timestamp", "url")}
    assert len(records) == 1000
    assert records[0]["url"] == "https://klyq.com/beginners-bbq-class-taking-place-in-missoula/"
    assert C4_SAMPLE.read_bytes()[4:8] == bytes(4)  # no time in the gzip header


def test_the_king_james_bible_has_its_chapters():
    chapters = [json.loads(line)["text"] for line in content(SAMPLES / "king-james.jsonl.bz2").decode().splitlines()]
    assert len(chapters) == 1189
    assert sum(map(len, chapters)) == 4_137_567
    assert chapters[0].startswith("In the beginning God created the heaven and the earth.")
    assert chapters[-1].endswith("The grace of our Lord Jesus Christ be with you all. Amen.")
    assert not re.search(r"[\d\[\]]", "".join(chapters))  # no numbers of verses, no brackets


def test_reversal_is_drawn_as_its_licence_file_says():
    draw, drawn = random.Random(0), dict[tuple[str, ...], None]()
    while len(drawn) < 12_000:
        length = draw.randint(4, 8)
        drawn.setdefault(tuple(draw.choice("abcdefghijklmnop") for _ in range(length)))
    lines = content(SAMPLES / "reversal.tsv.bz2").decode().splitlines()
    assert lines == [f"{' '.join(letters)}\t{' '.join(reversed(letters))}" for letters in drawn]


def test_integer_sequences_are_all_that_the_licence_file_defines():
    found = dict[tuple[int, ...], None]()
    for p, q, *terms in product(range(10), repeat=4):
        while len(terms) < 24:
            terms.append((p * terms[-1] + q * terms[-2]) % 10)
        found.setdefault(tuple(terms))
    lines = content(SAMPLES / "integer-sequences.txt.bz2").decode().splitlines()
    assert lines == [" ".join(map(str, terms)) for terms in found]


def test_samples_are_small_and_have_their_licences():
    assert sum(path.stat().st_size for path in SAMPLES.iterdir()) < 5.4e6
    licences = (SAMPLES / "LICENSES.md").read_text()
    assert all(path.name in licences for path in SAMPLES.iterdir() if path.name != "LICENSES.md")
