"""The text that a tokenizer is trained on: what is drawn, its memory, and how it is cut."""

import hashlib
import re
from pathlib import Path

import pytest

from data_pipeline.config import TokenizerConfig
from data_pipeline.execution.parts import part_file
from data_pipeline.foundation.errors import FailedError
from data_pipeline.stages import tokenizer
from data_pipeline.stages.tokenizer import Sample, TokenizerResult, TokenizerSpec
from data_pipeline.text.document import Document
from data_pipeline.tokenizer.training import _cut, check_memory, draw_sample, train
from tests.tables import each

PARTS, DOCUMENTS = 6, 300  # and documents of a part


def text_of(number: int, place: int) -> str:
    return f"{number} {place} " + "wör " * (place % 40)


def write_parts(folder: Path) -> list[str]:
    """The paths of the parts, in which every tenth document is held out."""
    paths = [f"documents/part-{number:05d}.parquet" for number in range(PARTS)]
    (folder / "documents").mkdir()
    for number, path in enumerate(paths):
        with part_file(folder / path) as file:
            for place in range(DOCUMENTS):
                split = "validation" if place % 10 == 7 else "train"
                file.add(Document(id=f"c4/{number}/{place:09d}", text=text_of(number, place), split=split))
    return paths


# of the training documents in these parts, by id
TEXTS = {f"c4/{part}/{n:09d}": text_of(part, n) for part in range(PARTS) for n in range(DOCUMENTS) if n % 10 != 7}


def test_the_sample_is_what_comes_first_by_hash_up_to_both_bounds(tmp_path):
    def place(identity: str) -> bytes:
        return hashlib.blake2b(f"3/tokenizer/{identity}".encode(), digest_size=8).digest()[::-1]

    in_order = [TEXTS[identity].encode() for identity in sorted(TEXTS, key=place)]
    paths = write_parts(tmp_path)
    for most, most_bytes in [(50, 10**6), (1, 10**6), (2000, 10**6), (2000, 7777), (30, 333), (5, 1)]:
        wanted = in_order[:most]
        for parts in (paths, paths[::-1]):
            sample = draw_sample(tmp_path, parts, 3, most, most_bytes)
            assert b"".join(sample) == b"".join(wanted)[:most_bytes]
            assert sample[:-1] == wanted[: len(sample) - 1]
            assert all(sample)


def test_training_that_the_memory_does_not_suffice_for_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.foundation.processes.available_memory", lambda: 2 * 10**9)
    config = TokenizerConfig(sample_bytes=10**15)
    spec = TokenizerSpec(config, seed=0, parts=["nowhere.parquet"], text_bytes=10**16)
    most = 2 * 10**9 // 23
    said = (
        "tokenizer.sample_bytes: training on 1,000,000,000,000,000 bytes takes up to 23000000.0 GB of memory, and "
        f"2.0 GB are free; set it to {most:,} or less, or use a machine with more memory"
    )
    with pytest.raises(FailedError, match=f"^{re.escape(said)}$"):
        tokenizer.STAGE.work(tmp_path, spec)
    check_memory(most)


def test_a_sample_is_no_larger_than_the_text_when_its_memory_is_checked(tmp_path):
    config = TokenizerConfig(sample_bytes=10**15, vocab_size=20, byte_fallback=False)
    parts = write_parts(tmp_path)
    sample = Sample(documents=len(TEXTS), bytes=len("".join(TEXTS.values()).encode()))
    found = tokenizer.STAGE.work(tmp_path, TokenizerSpec(config, seed=0, parts=parts, text_bytes=sample.bytes))
    assert found == TokenizerResult(pieces=20, sample=sample)


def test_both_sides_of_pairs_are_in_the_sample(tmp_path):
    """The letters of a translation get pieces, even if no input contains them."""
    with part_file(tmp_path / "part.parquet") as part:
        for number in range(200):
            english, greek = f"the house of number {number} is old", f"το σπίτι με αριθμό {number} είναι παλιό"
            part.add(Document(f"p/{number}", english, "", "", "en", "pairs", "train", target=greek))
    config = TokenizerConfig(vocab_size=60, byte_fallback=False)
    model = train(config, draw_sample(tmp_path, ["part.parquet"], 0, 1000, 10**6))
    (ids,) = model.encode(["το σπίτι είναι παλιό"])
    assert model.vocabulary.unk not in ids


@each(
    "line",
    ["", " a b", "ä" * 9_001, f"{'a' * 3_999} b", "word " * 5_000, f"a{' ' * 9_000}b", "字 " * 3_000 + "x" * 5_000],
)
def test_long_lines_are_cut_at_spaces_to_what_the_trainer_takes(line):
    parts = list(_cut(line))
    assert all(0 < len(part.encode()) <= 4_000 for part in parts)
    assert "".join(parts).replace(" ", "") == line.replace(" ", "")


def test_cutting_a_line_takes_no_more_for_each_part_of_a_longer_one():
    """Characters of the rest that are copied: counted, since time depends on the machine."""

    class Counted(str):
        copied = 0

        def __getitem__(self, key):
            part = super().__getitem__(key)
            Counted.copied += len(part)
            return part

    assert len(list(_cut(Counted("word " * 400_000)))) == 2_000_000 / 4_000
    assert Counted.copied < 3 * 2_000_000
