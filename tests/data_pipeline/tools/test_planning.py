"""The forecast of a build, compared with the build."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.stages import report
from data_pipeline.stages.inputs import list_inputs
from data_pipeline.stages.pipeline import build
from data_pipeline.tools import planning
from tests.conftest import SAMPLES
from tests.support.builds import OFF, plain
from tests.support.in_process import done_here

SPANS = {"name": "span_corruption", "inputs_length": 64}


@pytest.fixture(autouse=True)
def room(monkeypatch) -> None:
    """A machine with enough memory and disk."""
    monkeypatch.setattr(planning, "available_memory", lambda: 10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 0, 10**12))


def settings(small_corpus: Path, *changes: str) -> CorpusConfig:
    return load(small_corpus.parent / "corpus.yaml", changes, CorpusConfig)


def test_a_plan_at_a_builds_own_speeds_is_that_build(small_corpus):
    found = report.read(small_corpus)
    for number, stage in enumerate(found.stages):  # as if the machine's clock had shown these
        speed = {"core_seconds": 10.0 + number, "megabytes_per_core_second": stage.megabytes / (10 + number)}
        found.stages[number] = replace(stage, **speed)
    planned = planning.forecast_build(settings(small_corpus), found, "of it", workers=2)
    built = {stage.name: stage for stage in found.stages}
    assert [stage.name for stage in planned.stages] == list(built)
    for stage in planned.stages:
        assert stage.core_seconds == pytest.approx(built[stage.name].core_seconds, rel=0.1, abs=0.1)
        assert stage.disk == pytest.approx(1e6 * built[stage.name].written_megabytes, rel=0.01)
    tokens = {split: counts.tokens + counts.dropped_tokens for split, counts in found.splits.items()}
    assert sum(planned.tokens.values()) == pytest.approx(sum(tokens.values()), rel=0.01)


def test_a_plan_with_symbols_has_the_builds_number_of_tokens(tmp_path):
    """A symbol is one match of the pattern in a vocabulary of any size: of 8 letters and a line break here, and of up
    to 256 symbols in the plan."""
    (tmp_path / "a.txt").write_text("MKTAYIAKQR\n" * 500)
    sections = {"dedup": OFF, "tokenizer": {"kind": "symbols"}, "rows": {"objective": SPANS}}
    config = plain(tmp_path, tmp_path / "a.txt", "text", **sections)
    found = report.read(build(config))
    counts = found.splits.values()
    planned = planning.forecast_build(config, found, "of it", workers=1)
    assert sum(planned.tokens.values()) == pytest.approx(sum(one.tokens + one.dropped_tokens for one in counts), abs=1)


def test_twice_the_workers_take_half_the_time_while_there_are_units(small_corpus):
    """Three inputs, each a unit and a part of documents, which are a unit each of `tokens`."""
    found = report.read(small_corpus)
    for number, stage in enumerate(found.stages):
        found.stages[number] = replace(stage, megabytes_per_core_second=stage.megabytes / 60)
    changes = ("ray.small_bytes=0", "bytes_per_shared_unit=1")
    for workers, seconds in ((1, 60), (2, 30), (3, 20), (64, 20)):
        planned = planning.forecast_build(settings(small_corpus, *changes), found, "", workers)
        assert planned.seconds == pytest.approx(sum(stage.seconds for stage in planned.stages))
        taken = {stage.name: stage.seconds for stage in planned.stages}
        assert (taken["documents"], taken["tokens"]) == pytest.approx((seconds, seconds), rel=0.01)
        assert taken["tokenizer"] == next(one.core_seconds for one in planned.stages if one.name == "tokenizer")


def test_warnings_say_what_will_fail(small_corpus, monkeypatch):
    found = report.read(small_corpus)
    assert planning.forecast_build(settings(small_corpus), found, "", workers=1).warnings == []
    monkeypatch.setattr(planning, "available_memory", lambda: 100_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    disk, tokenizer, workers = planning.forecast_build(settings(small_corpus), found, "", workers=1).warnings
    assert disk.startswith("output: the build writes ")
    assert "1.0 kB are free" in disk
    assert tokenizer.endswith("100.0 MB are free here; lower tokenizer.sample_bytes")
    assert workers.endswith("100.0 MB are free here; lower ray.num_cpus")
    keys = [replace(found.stages[0], name=f"{step}-keys", keys=10) for step in ("urls", "minhash")]
    found = replace(found, stages=[*found.stages, *keys])
    found = replace(found, sources={"c4": replace(found.sources["c4"], read=10**6)})
    near = settings(small_corpus, "dedup.minhash=true", "dedup.urls=newest")
    planned = planning.forecast_build(near, found, "", workers=1)
    assert planned.memory["minhash-clusters"] == pytest.approx(160e6, rel=0.01)
    assert "160.0 MB more at most for minhash-clusters" in planning.as_text(planned)
    assert planned.warnings[-1].startswith("minhash-clusters: 160.0 MB of memory at most, and 100.0 MB are free here")


def test_the_calibration_reads_hidden_files_that_the_path_names(tmp_path):
    hidden = tmp_path / "in/.hidden/a.txt"
    hidden.parent.mkdir(parents=True)
    hidden.write_text("A text.")
    source = SourceConfig(format="text", path=str(tmp_path / "in/.h*/*.txt"))
    sampled = planning._sampled(source, tmp_path / "sample", 1000, str(tmp_path / "corpus"))
    assert [file.name for file in list_inputs(sampled).files] == [".hidden/a.txt"]


@pytest.mark.slow
def test_the_calibration_builds_the_first_bytes_of_each_source_and_leaves_nothing(small_corpus, tmp_path):
    sources = [
        {"format": "wikipedia", "name": "wiki", "path": str(SAMPLES / "*articles2.xml.bz2")},
        {"format": "c4", "path": str(small_corpus.parent / "*.json.gz")},
    ]
    changes = {"output": str(tmp_path / "corpus"), "sources": sources}
    config = CorpusConfig.model_validate({**settings(small_corpus).model_dump(exclude_unset=True), **changes})
    found = planning.calibrate(config, sizes=(300_000,))
    assert found.sources["wiki"].bytes == 300_000
    assert found.sources["c4"].read == 180  # all three files, since the largest is smaller
    assert list(tmp_path.iterdir()) == []
    names = [stage.name for stage in planning.forecast_build(config, found, "").stages]
    assert names == ["documents", "tokenizer", "tokens", "shards"]


def test_the_command_prints_80_columns_and_json(small_corpus):
    config = small_corpus.parent / "corpus.yaml"
    printed = done_here("data-pipeline", "plan", config, "--speeds", small_corpus)
    assert max(map(len, printed.splitlines()[1:])) <= 80
    assert "Ray" not in printed
    found = json.loads(done_here("data-pipeline", "plan", config, "--speeds", small_corpus, "--json"))
    assert found["seconds"] == pytest.approx(sum(stage["seconds"] for stage in found["stages"]))


def test_speeds_of_other_sources_or_steps_are_refused(small_corpus):
    found = report.read(small_corpus)
    with pytest.raises(UserError, match="--speeds: the report lacks minhash-keys"):
        planning.forecast_build(settings(small_corpus, "dedup.minhash=true"), found, "")
    found = replace(found, sources={"other": found.sources["c4"]})
    with pytest.raises(UserError, match="--speeds: the report lacks c4"):
        planning.forecast_build(settings(small_corpus), found, "")
