"""Planning: the spec of a unit doesn't grow with the number of units."""

import json

import numpy as np
import pytest
from pydantic_core import to_json

from data_pipeline.config import CorpusConfig
from data_pipeline.execution.buckets import TokenBucket, bucket_numbers
from data_pipeline.execution.merging import read_names
from data_pipeline.execution.parts import Histograms
from data_pipeline.execution.work_units import Finished, Output
from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.json_file import parse_json
from data_pipeline.sources.record import Range
from data_pipeline.stages import shards, tokens
from data_pipeline.stages.tokenizer import Sample, TokenizerResult
from data_pipeline.stages.tokens import TokensResult
from data_pipeline.text.document import Document
from tests.tables import each

CONFIG = CorpusConfig.model_validate(
    {
        "name": "planned",
        "output": "nowhere",
        "sources": [{"format": "wet", "path": "*.wet.gz"}],
        "rows": {"packing": "complete_documents"},
    }
)
TRAINED = Finished(
    "spiece", "", TokenizerResult(1, Sample()), {"tokenizer/spiece.model": Output(1, "0" * 64)}, 1.0, 1.0
)


def names_of(units: shards.Tokenized) -> list[str]:
    return [name for unit in units for name in unit.outputs]


COUNTED = Finished("train-00000", "", shards.RowsResult(7), {}, 1.0, 1.0)


def tokenized(number: int) -> shards.Tokenized:
    """`number` units of the tokens stage, each with the tokens of one shard."""
    of_each = TokensResult({"train": CONFIG.tokens_per_shard, "validation": 0})
    return [
        Finished(name, "", of_each, {f"{name}.safetensors": Output(1, f"{part:064x}")}, 1.0, 1.0)
        for part in range(number)
        for name in [f"part-{part:05d}"]
    ]


def test_what_a_unit_is_sent_does_not_grow_with_the_number_of_units(tmp_path):
    longest = {}
    for number in (10, 1000):
        units = shards.plan_counts(CONFIG, tmp_path, tokenized(number), names_of(tokenized(number)), TRAINED)
        assert len(units) == number + 1  # and one for validation
        longest[number] = max(len(to_json(unit)) for unit in units)
        (names,) = {unit.spec.files for unit in units}
        assert read_names(tmp_path, names) == [f"part-{part:05d}.safetensors" for part in range(number)]
    assert longest[1000] - longest[10] <= 10  # digits of its number, and of how many there are


def test_every_units_fingerprint_depends_on_every_file(tmp_path):
    files = tokenized(3)
    before = shards.plan_counts(CONFIG, tmp_path, files, names_of(files), TRAINED)
    files[1].outputs["part-00001.safetensors"] = Output(1, "f" * 64)
    after = shards.plan_counts(CONFIG, tmp_path, files, names_of(files), TRAINED)
    assert all(one.inputs != other.inputs for one, other in zip(before, after, strict=True))
    assert [unit.spec for unit in before] == [unit.spec for unit in after]


def test_a_result_is_checked_as_it_is_read():
    content = json.loads(to_json(COUNTED))
    assert parse_json(json.dumps(content), shards.COUNT.finished, "") == COUNTED
    content["result"]["rows"] = "7"
    with pytest.raises(FailedError, match=r"a\.json: damaged: result\.rows: .* got '7'"):
        parse_json(json.dumps(content), shards.COUNT.finished, "a.json")
    with pytest.raises(FailedError, match=r"a\.json: damaged: result\.tokens: "):
        parse_json(json.dumps(content), tokens.STAGE.finished, "a.json")


def test_the_fingerprint_of_a_dataclass_is_that_of_its_fields():
    fields = {"tokens": {"train": 1}, "lengths": {"8": 1}, "uncovered": {}, "characters": {}}
    assert fingerprint([TokensResult({"train": 1}, {"8": 1}), Range(2)]) == fingerprint([fields, [2, None, 0]])
    assert fingerprint(CONFIG) == fingerprint(CONFIG.model_dump())


@each("count", [1, 3, 7, 4096, 4200])
def test_the_bounds_of_a_bucket_fall_into_it(count):
    for number in {0, 1, count // 2, count - 1} & set(range(count)):
        bounds = np.array(TokenBucket("train", number, count).bounds, np.uint64)
        assert bucket_numbers(bounds, count).tolist() == [number, number]


@each(
    "url, domain",
    [
        ("https://www.example.org/a", "example.org"),
        ("http://example.org", "example.org"),
        ("http://example.org?a", "example.org"),
        ("HTTP://User@WWW.Example.org:80/a", "example.org"),
        ("http://[::1]/", "::1"),
        ("http://[::1/", "unknown"),
        ("example.org/a", "unknown"),
    ],
)
def test_documents_are_counted_by_domain(url, domain):
    histograms = Histograms()
    histograms.add(Document("id", "text", url, "", "en", "source", "train", "", ""))
    assert histograms.most_common_domains() == {domain: 1}


def test_what_a_unit_returns_does_not_grow_with_its_documents():
    histograms = Histograms()
    for number in range(20_000):
        for url in [f"http://site{number}.org/", "http://www.frequent.org/"]:
            histograms.add(Document("id", "text", url, "", "en", "source", "train", "", ""))
        if number % 5000 == 4999:
            histograms.end_part()
    assert len(histograms.domains) == 10_000
    told = histograms.most_common_domains()
    assert len(told) == 100
    assert next(iter(told.items())) == ("frequent.org", 20_000)
