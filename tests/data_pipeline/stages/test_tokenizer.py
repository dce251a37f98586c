"""The text that a tokenizer is trained on: what is drawn, also from candidates, its memory, and how it is cut."""

import hashlib
import itertools
import re
from pathlib import Path

import pytest

from data_pipeline.base.errors import FailedError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePieceConfig, _cut, train
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Finished, Output
from data_pipeline.stages import tokenizer
from data_pipeline.stages.parts import Part, part_file
from data_pipeline.stages.tokenizer import (
    Sample,
    TokenizerResult,
    TokenizerSpec,
    draw_sample,
    files_to_read,
    plan_sampling,
    sample_rank,
)
from data_pipeline.text.document import Document
from tests.support.tables import each

PARTS, DOCUMENTS = 6, 300  # and documents of a part


def write_part(folder: Path, number: int, texts: list[str]) -> Part:
    path = f"documents/part-{number:05d}.parquet"
    (folder / path).parent.mkdir(exist_ok=True)
    with part_file(LocalStore(folder), path) as file:
        for place, text in enumerate(texts):
            identity = f"c4/{number}/{place:09d}"
            held_out = "validation" if place % 10 == 7 else "train"
            file.add(Document(id=identity, text=text, url="", title="", language="en", source="c4", split=held_out))
    return Part.of(file.describe(path, "c4", f"c4/{number}/{0:09d}"), [str(number)])


def text_of(number: int, place: int) -> str:
    return f"{number} {place} " + "wör " * (place % 40)


def write_parts(folder: Path) -> list[Part]:
    return [write_part(folder, number, [text_of(number, n) for n in range(DOCUMENTS)]) for number in range(PARTS)]


# of the training documents in these parts, by id
TEXTS = {f"c4/{part}/{n:09d}": text_of(part, n) for part in range(PARTS) for n in range(DOCUMENTS) if n % 10 != 7}


def finished(folder, units):
    """The units after their work, as a build would have them."""
    done = []
    for unit in units:
        (folder / unit.outputs[0]).parent.mkdir(parents=True, exist_ok=True)
        outputs = {name: Output(0, "") for name in unit.outputs}
        done.append(
            Finished(
                unit.name,
                unit.inputs,
                tokenizer.SAMPLING.work(Context(LocalStore(folder)), unit.spec),
                outputs,
                0.0,
                0.0,
            )
        )
    return done


def test_the_sample_is_what_comes_first_by_hash_up_to_both_bounds(tmp_path):
    def place(identity: str) -> bytes:
        return hashlib.blake2b(f"3/tokenizer/{identity}".encode(), digest_size=8).digest()[::-1]

    in_order = [TEXTS[identity].encode() for identity in sorted(TEXTS, key=place)]
    paths = [part.path for part in write_parts(tmp_path)]
    for most, most_bytes in [(50, 10**6), (1, 10**6), (2000, 10**6), (2000, 7777), (30, 333), (5, 1)]:
        wanted = in_order[:most]
        for parts in (paths, paths[::-1]):
            sample = draw_sample(LocalStore(tmp_path), parts, 3, most, most_bytes)
            assert b"".join(sample) == b"".join(wanted)[:most_bytes]
            assert sample[:-1] == wanted[: len(sample) - 1]
            assert all(sample)


BOUNDS = [{"sample_bytes": 20_000}, {"sample_bytes": 10**7, "sample_documents": 100}]


@each("seed, bounds", itertools.product([0, 1, 2], BOUNDS))
def test_the_sample_of_the_candidates_is_that_of_all_documents(tmp_path, monkeypatch, seed, bounds):
    parts = write_parts(tmp_path)
    monkeypatch.setattr(tokenizer, "_UNIT_BYTES", 60_000)
    config = SentencePieceConfig(**bounds)
    units = plan_sampling(config, seed, parts)
    assert 1 < len(units) < PARTS
    assert [path for unit in units for path in unit.spec.parts] == [part.path for part in parts]
    done = finished(tmp_path, units)
    to_read = files_to_read(config, parts, done)
    assert to_read == [name for unit in units for name in unit.outputs]
    kept = sum(unit.result.kept for unit in done)
    assert 100 <= kept < PARTS * DOCUMENTS / 2
    everything = [part.path for part in parts]
    bounds = (config.sample_documents, config.sample_bytes)
    sample, of_all = (draw_sample(LocalStore(tmp_path), files, seed, *bounds) for files in (to_read, everything))
    assert sample == of_all


def test_all_documents_are_read_if_the_candidates_are_too_few(tmp_path):
    """Nearly all text is in one document, which isn't among the candidates."""
    texts = [["a"] * DOCUMENTS for _ in range(PARTS)]
    last = max(range(PARTS), key=lambda number: sample_rank(0, f"c4/{number}/{0:09d}"))
    texts[last][0] = "long " * 100_000
    parts = [write_part(tmp_path, number, own) for number, own in enumerate(texts)]
    config = SentencePieceConfig(sample_bytes=100_000)
    done = finished(tmp_path, plan_sampling(config, 0, parts))
    assert sum(unit.result.bytes for unit in done) < config.sample_bytes
    assert files_to_read(config, parts, done) == [part.path for part in parts]


def test_candidates_do_not_change_what_the_tokenizer_is_trained_again_for(tmp_path):
    parts, config = write_parts(tmp_path), SentencePieceConfig(sample_bytes=20_000)
    done = finished(tmp_path, plan_sampling(config, 0, parts))
    (of_all,), (of_candidates,) = tokenizer.plan(config, 0, parts), tokenizer.plan(config, 0, parts, done)
    assert of_all.inputs == of_candidates.inputs
    assert of_all.spec.parts != of_candidates.spec.parts
    # none are chosen for a small corpus or a tokenizer that isn't trained
    assert not plan_sampling(SentencePieceConfig(), 0, parts)
    assert not plan_sampling(SentencePieceConfig(sample_bytes=20_000, path="spiece.model"), 0, parts)


def test_training_that_the_memory_does_not_suffice_for_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.base.processes.available_memory", lambda: 2 * 10**9)
    config = SentencePieceConfig(sample_bytes=10**15)
    spec = TokenizerSpec(config, seed=0, parts=["nowhere.parquet"], text_bytes=10**16)
    most = 2 * 10**9 // 26
    said = (
        "tokenizer.sample_bytes: training on 1,000,000,000,000,000 bytes takes up to 26000000.0 GB of memory, and "
        f"2.0 GB are free; set it to {most:,} or less, or use a machine with more memory"
    )
    with pytest.raises(FailedError, match=f"^{re.escape(said)}$"):
        tokenizer.STAGE.work(Context(LocalStore(tmp_path)), spec)
    tokenizer.check_memory(config, most)


def test_a_sample_is_no_larger_than_the_text_when_its_memory_is_checked(tmp_path):
    config = SentencePieceConfig(sample_bytes=10**15, vocab_size=20, byte_fallback=False)
    parts = [part.path for part in write_parts(tmp_path)]
    sample = Sample(documents=len(TEXTS), bytes=len("".join(TEXTS.values()).encode()))
    found = tokenizer.STAGE.work(
        Context(LocalStore(tmp_path)), TokenizerSpec(config, seed=0, parts=parts, text_bytes=sample.bytes)
    )
    assert found == TokenizerResult(pieces=20, sample=sample)


def test_both_sides_of_pairs_are_in_the_sample(tmp_path):
    """The letters of a translation get pieces, even if no input contains them."""
    with part_file(LocalStore(tmp_path), "part.parquet") as part:
        for number in range(200):
            english, greek = f"the house of number {number} is old", f"το σπίτι με αριθμό {number} είναι παλιό"
            part.add(Document(f"p/{number}", english, "", "", "en", "pairs", "train", target=greek))
    config = SentencePieceConfig(vocab_size=60, byte_fallback=False)
    model = train(config, draw_sample(LocalStore(tmp_path), ["part.parquet"], 0, 1000, 10**6))
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
