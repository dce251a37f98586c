"""Units of the stages `rows` and `shards`: what each is sent and returns doesn't grow with their number."""

import json
from pathlib import Path

import pytest
from pydantic_core import to_json

from data_pipeline.base.errors import FailedError
from data_pipeline.base.json_file import parse_json
from data_pipeline.base.local_store import LocalStore
from data_pipeline.engine import merging
from data_pipeline.engine.work_units import Finished, Output
from data_pipeline.stages import shards, tokens
from data_pipeline.stages.tokenizer import Sample, TokenizerResult
from data_pipeline.stages.tokens import TokensResult
from tests.support.builds import plain

CONFIG = plain(Path("nowhere"), "*.wet.gz", "wet", rows={"packing": "complete_documents"})
MODEL = {"tokenizer/spiece.model": Output(1, "0" * 64)}
TRAINED = Finished("spiece", "", TokenizerResult(1, Sample()), MODEL, 1.0, 1.0)


def names_of(units: shards.Tokenized) -> list[str]:
    return [name for unit in units for name in unit.outputs]


COUNTED = Finished("train-00000", "", shards.RowsResult(7), {}, 1.0, 1.0)


def tokenized(number: int) -> shards.Tokenized:
    """`number` units of the tokens stage, each with the tokens of one shard."""
    of_each = TokensResult({"train": CONFIG.tokens_per_shard, "validation": 0})
    outputs = [(f"part-{part:05d}", Output(1, f"{part:064x}")) for part in range(number)]
    return [Finished(name, "", of_each, {f"{name}.safetensors": output}, 1.0, 1.0) for name, output in outputs]


def test_specs_of_units_do_not_grow_with_the_number_of_units(tmp_path):
    longest, corpus = {}, LocalStore(tmp_path)
    for number in (10, 1000):
        buckets = shards.specs_of(CONFIG, corpus, tokenized(number), names_of(tokenized(number)), TRAINED)
        units = shards.plan_counts(CONFIG, buckets, {"train": 0, "validation": 0})
        assert len(units) == number + 1  # and one for validation
        longest[number] = max(len(to_json(unit)) for unit in units)
        (names,) = {unit.spec.files for unit in units}
        assert merging.read_names(corpus, names) == tuple(f"part-{part:05d}.safetensors" for part in range(number))
    assert longest[1000] - longest[10] <= 10  # digits of its number, and of how many there are


def test_every_units_fingerprint_depends_on_every_file(tmp_path):
    files = tokenized(3)
    before = shards.specs_of(CONFIG, LocalStore(tmp_path), files, names_of(files), TRAINED)
    files[1].outputs["part-00001.safetensors"] = Output(1, "f" * 64)
    after = shards.specs_of(CONFIG, LocalStore(tmp_path), files, names_of(files), TRAINED)
    assert all(one != other for (_, one), (_, other) in zip(before, after, strict=True))
    assert [spec for spec, _ in before] == [spec for spec, _ in after]


def test_a_result_is_checked_as_it_is_read():
    content = json.loads(to_json(COUNTED))
    assert parse_json(json.dumps(content), shards.COUNT.finished, "") == COUNTED
    content["result"]["rows"] = "7"
    with pytest.raises(FailedError, match=r"a\.json: damaged: result\.rows: .* got '7'"):
        parse_json(json.dumps(content), shards.COUNT.finished, "a.json")
    with pytest.raises(FailedError, match=r"a\.json: damaged: result\.tokens: "):
        parse_json(json.dumps(content), tokens.STAGE.finished, "a.json")
