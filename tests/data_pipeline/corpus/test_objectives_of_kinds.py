"""Objectives over the vocabularies of all kinds of tokenizers: T5's examples, with the ids of the kind's sentinels."""

import json
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.objectives.denoising import Denoising
from data_pipeline.corpus.objectives.iid_denoising import IidDenoising
from data_pipeline.corpus.objectives.language_modelling import CausalInfilling, CausalLM, FullLM, PrefixLM
from data_pipeline.corpus.objectives.objective import Padded
from data_pipeline.corpus.objectives.randomness import row_keys
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.bpe import BPEConfig
from data_pipeline.corpus.tokenizer.byt5 import Bytes
from data_pipeline.corpus.tokenizer.ids import Ids
from data_pipeline.corpus.tokenizer.symbols import SymbolsConfig
from data_pipeline.loading.reader import Reader
from tests.conftest import write_c4, write_corpus_file
from tests.support.builds import built
from tests.support.example_rows import as_lists, assert_alike, assert_rows_stand_alone
from tests.support.reading import c4_pages
from tests.support.tables import each

PAGES = c4_pages()[:100]
NUMBERS = [" ".join(str(ord(character) % 256) for character in page) for page in PAGES]
SPECIAL = ("<mask>", "<s>", "[R]", "[S]", "[X]")
MODELS = {
    "bytes": Bytes,
    "characters": lambda: SymbolsConfig().train([page.encode() for page in PAGES]),
    "words": lambda: SymbolsConfig(pattern=r"\s|\w+|[^\w\s]").train([page.encode() for page in PAGES]),
    "bpe": lambda: BPEConfig(vocab_size=400).train([page.encode() for page in PAGES]),
    "ids": lambda: Ids(256),
}
SETTINGS = {
    "bytes": {"kind": "bytes"},
    "characters": {"kind": "symbols"},
    "bpe": {"kind": "bpe", "vocab_size": 400},
    "ids": {"kind": "ids", "vocab_size": 256},
}
OBJECTIVES = [
    SpanCorruption(inputs_length=64),
    SpanCorruption(inputs_length=64, mean_span_length=20.0),  # ByT5's
    IidDenoising(inputs_length=64),
    PrefixLM(length=64),
    FullLM(length=64),
    CausalLM(length=63),
    CausalInfilling(length=63, fim_rate=1.0),
    Denoising(length=64),
]


@pytest.fixture(scope="module", params=MODELS)
def tokenizer(request):
    return Tokenizer(MODELS[request.param](), SPECIAL, 60)


def rows_of(tokenizer, length):
    pages = NUMBERS if isinstance(tokenizer.model, Ids) else PAGES
    ids = [one[:length] for one in tokenizer.encode(pages) if len(one) >= length][:30]
    return Padded.full(np.array(ids, dtype=np.uint16)), row_keys(0, "test", 0, np.arange(len(ids)))


def without_sentences(objective, vocabulary):
    """BART's objective for a vocabulary in which nothing ends a sentence."""
    if not isinstance(objective, Denoising) or vocabulary.sentence_ends.any():
        return objective
    assert "needs tokens that end a sentence" in objective.problems(vocabulary)[0]
    return Denoising(length=64, permute_sentence_ratio=0.0)


def write_source(kind, path, records=40, skip=0):
    """A file of pages, and the sections of a corpus file for it. Ids are code points mod 256."""
    if kind != "ids":
        write_c4(path.with_suffix(".json.gz"), records, skip)
        return {}
    lines = (json.dumps({"codes": [*map(int, page.split())]}) + "\n" for page in NUMBERS[skip : skip + records])
    path.with_suffix(".jsonl").write_text("".join(lines))
    return {"sources": [{"format": "jsonl", "path": str(path.parent / "*.jsonl"), "options": {"ids": "codes"}}]}


@each("objective", OBJECTIVES)
def test_examples_are_those_of_t5s_vocabulary_with_the_kinds_sentinels(tokenizer, objective):
    ours = tokenizer.vocabulary
    objective = without_sentences(objective, ours)
    assert objective.problems(ours) == []
    t5s = replace(ours, first_sentinel=ours.size + 59, sentinel_step=-1)
    rows, keys = rows_of(tokenizer, objective.raw_length)
    found, expected = (
        one.apply(rows, keys, vocabulary, {}) for one, vocabulary in ((objective, ours), (objective, t5s))
    )
    names = {t5s.sentinel(number): ours.sentinel(number) for number in range(60)}
    for side in ("inputs", "targets"):
        renamed = [[names.get(id_, id_) for id_ in row] for row in as_lists(getattr(expected, side))]
        assert as_lists(getattr(found, side)) == renamed
    assert_rows_stand_alone(objective, rows, keys, ours)


def test_spans_and_their_rest_are_the_text(tokenizer):
    vocabulary, objective = tokenizer.vocabulary, SpanCorruption(inputs_length=64)
    rows, keys = rows_of(tokenizer, objective.raw_length)
    examples = objective.apply(rows, keys, vocabulary, {})
    for row, inputs, targets in zip(as_lists(rows), as_lists(examples.inputs), as_lists(examples.targets), strict=True):
        spans, number, restored = [], -1, []
        for id_ in targets[:-1]:
            if id_ in vocabulary.sentinel_ids:
                assert id_ == vocabulary.sentinel(len(spans))
                spans.append([])
            else:
                spans[-1].append(id_)
        for id_ in inputs[:-1]:
            number += id_ in vocabulary.sentinel_ids
            restored += spans[number] if id_ in vocabulary.sentinel_ids else [id_]
        assert restored == row
        assert tokenizer.decode(restored) == tokenizer.decode(row)


DENOISERS = [
    {"mode": "R", "denoiser": {"name": "span_corruption", "inputs_length": 32}},
    {"mode": "S", "denoiser": {"name": "prefix_lm", "length": 30, "noise_density": 0.25}, "rate": 2},
    {"mode": "X", "denoiser": {"name": "span_corruption", "inputs_length": 32, "noise_density": 0.5}},
]
BUILT = {
    "ul2": {"objective": {"name": "ul2", "denoisers": DENOISERS}},
    "bart": {"objective": {"name": "denoising", "length": 64}, "packing": "complete_documents"},
}


@pytest.mark.slow
@each("kind", SETTINGS)
@each("name", BUILT)
def test_noise_in_the_shards_is_that_of_the_loaders_first_epoch(kind, name, tmp_path):
    source = write_source(kind, tmp_path / "pages")
    tokenizer = {**SETTINGS[kind], "special_tokens": list(SPECIAL), "sentinels": 40}
    rows = BUILT[name]
    if (name, kind) == ("bart", "ids"):
        rows = {**rows, "objective": {**rows["objective"], "permute_sentence_ratio": 0.0}}
    found = []
    for at in ("load", "build"):
        changes = {"output": str(tmp_path / at), "tokenizer": tokenizer, "rows": {**rows, "apply_at": at}}
        corpus = open_corpus(built(write_corpus_file(tmp_path / f"{at}.yaml", **source, **changes)))
        found.append(Reader(corpus, "train").examples(np.arange(corpus.rows("train")), 0))
    assert_alike(*found)


@pytest.mark.slow
@each("kind", SETTINGS)
def test_workers_of_ray_build_the_same_vocabulary_and_shards_as_one_process(kind, tmp_path):
    for part in range(3):
        source = write_source(kind, tmp_path / f"pages-{part}", 30, 30 * part)
    found = []
    for name, ray in {"here": {}, "ray": {"num_cpus": 3, "small_bytes": 0}}.items():
        changes = {"output": str(tmp_path / name), "tokenizer": SETTINGS[kind], "ray": ray}
        corpus = built(write_corpus_file(tmp_path / f"{name}.yaml", **source, **changes))
        files = sorted((corpus / "tokenizer").iterdir()) + sorted((corpus / "shards").rglob("*.tar"))
        found.append({str(file.relative_to(corpus)): file.read_bytes() for file in files})
    assert found[0] == found[1]
    assert len(found[0]) > 1
