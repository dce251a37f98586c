"""Candidates for the tokenizer's sample: the sample from them is the sample from all documents."""

import itertools
from pathlib import Path

from data_pipeline.config import TokenizerConfig
from data_pipeline.execution.parts import Part, part_file
from data_pipeline.execution.work_units import Finished, Output
from data_pipeline.stages import tokenizer
from data_pipeline.stages.tokenizer import files_to_read, plan_sampling
from data_pipeline.text.document import Document
from data_pipeline.tokenizer.training import draw_sample, sample_rank
from tests.tables import each

PARTS, DOCUMENTS = 6, 300  # and documents of a part


def write_part(folder: Path, number: int, texts: list[str]) -> Part:
    path = f"documents/part-{number:05d}.parquet"
    (folder / path).parent.mkdir(exist_ok=True)
    with part_file(folder / path) as file:
        for place, text in enumerate(texts):
            identity = f"c4/{number}/{place:09d}"
            held_out = "validation" if place % 10 == 7 else "train"
            file.add(Document(id=identity, text=text, url="", title="", language="en", source="c4", split=held_out))
    return Part(**vars(file.describe(path, "c4", f"c4/{number}/{0:09d}")), checksums=[str(number)])


def write_parts(folder: Path) -> list[Part]:
    texts = ([f"{number} {place} " + "word " * (place % 40) for place in range(DOCUMENTS)] for number in range(PARTS))
    return [write_part(folder, number, own) for number, own in enumerate(texts)]


def finished(folder, units):
    """The units after their work, as a build would have them."""
    done = []
    for unit in units:
        (folder / unit.outputs[0]).parent.mkdir(parents=True, exist_ok=True)
        outputs = {name: Output(0, "") for name in unit.outputs}
        done.append(Finished(unit.name, unit.inputs, tokenizer.SAMPLING.work(folder, unit.spec), outputs, 0.0, 0.0))
    return done


BOUNDS = [{"sample_bytes": 20_000}, {"sample_bytes": 10**7, "sample_documents": 100}]


@each("seed, bounds", itertools.product([0, 1, 2], BOUNDS))
def test_the_sample_of_the_candidates_is_that_of_all_documents(tmp_path, monkeypatch, seed, bounds):
    parts = write_parts(tmp_path)
    monkeypatch.setattr(tokenizer, "_UNIT_BYTES", 60_000)
    config = TokenizerConfig(**bounds)
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
    assert draw_sample(tmp_path, to_read, seed, *bounds) == draw_sample(tmp_path, everything, seed, *bounds)


def test_all_documents_are_read_if_the_candidates_are_too_few(tmp_path):
    """Nearly all text is in one document, which isn't among the candidates."""
    texts = [["a"] * DOCUMENTS for _ in range(PARTS)]
    last = max(range(PARTS), key=lambda number: sample_rank(0, f"c4/{number}/{0:09d}"))
    texts[last][0] = "long " * 100_000
    parts = [write_part(tmp_path, number, own) for number, own in enumerate(texts)]
    config = TokenizerConfig(sample_bytes=100_000)
    done = finished(tmp_path, plan_sampling(config, 0, parts))
    assert sum(unit.result.bytes for unit in done) < config.sample_bytes
    assert files_to_read(config, parts, done) == [part.path for part in parts]


def test_candidates_do_not_change_what_the_tokenizer_is_trained_again_for(tmp_path):
    parts, config = write_parts(tmp_path), TokenizerConfig(sample_bytes=20_000)
    done = finished(tmp_path, plan_sampling(config, 0, parts))
    (of_all,), (of_candidates,) = tokenizer.plan(config, 0, parts), tokenizer.plan(config, 0, parts, done)
    assert of_all.inputs == of_candidates.inputs
    assert of_all.spec.parts != of_candidates.spec.parts
    # none are chosen for a small corpus or a tokenizer that isn't trained
    assert not plan_sampling(TokenizerConfig(), 0, parts)
    assert not plan_sampling(TokenizerConfig(sample_bytes=20_000, path="spiece.model"), 0, parts)
