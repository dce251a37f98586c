"""Merged files hold what the files held: builds that merge, or read several parts as one, have the same bytes."""

import pickle
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors import safe_open

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.object_store import ObjectStore
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup import keys
from data_pipeline.engine import merging
from data_pipeline.engine.work_units import Finished, Output, Result, read_finished
from data_pipeline.stages import parts, report, shards, tokens
from data_pipeline.stages.documents import STAGE as DOCUMENTS_STAGE
from data_pipeline.stages.pipeline import build
from data_pipeline.tools import planning
from tests.conftest import write_c4, write_corpus_file
from tests.support.builds import checksums, documents_of, dropped_of, flip, trained
from tests.support.tables import each


def test_a_worker_reads_a_list_of_names_once_for_its_units(tmp_path):
    corpus = LocalStore(tmp_path)
    path = merging.write_names(corpus, ["a", "b"])
    before = merging.read_names.cache_info()
    for _ in range(5):  # each unit comes with its own copy of the store
        assert merging.read_names(pickle.loads(pickle.dumps(corpus)), path) == ("a", "b")
    after = merging.read_names.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (4, 1)
    assert corpus != LocalStore(tmp_path / "other")


@each(
    "files, readers, size, units",
    [
        (1, 1, 1, 0),
        (1000, 1000, 1, 0),  # a small corpus pays nothing
        (1024, 1, 1, 0),
        (1025, 1, 2, 1),
        (2_048, 4_200, 9, 227),
        (56_000, 4_200, 236, 238),
        (56_000, 256, 55, 1019),
        (1_024, 56_000, 61, 17),
        (300_000, 20_000, 6000, 50),
        (72_000, 4_194, 303, 238),
    ],
)
def test_files_are_merged_where_their_readers_would_open_many(files, readers, size, units):
    assert merging.group_size(files, readers, 10**6) == size
    names = {str(number): "" for number in range(files)}
    planned = merging.plan("", names, readers, 10**6)
    assert len(planned) == units
    done = [Finished(unit.name, "", Result(), {unit.outputs[0]: Output(1, "")}, 1.0, 1.0) for unit in planned]
    left = merging.to_read(names, done, readers, 10**6)
    assert [*left[: len(left) - units], *(name for unit in planned for name in unit.spec.files)] == [*names]
    assert len(left) <= 1024
    assert len(left) * readers <= 1e6


@each(
    "files, readers, size, whole", [(1025, 1, 2, 1023), (282, 4194, 2, 194), (56_000, 256, 55, 0), (7, 250_000, 2, 1)]
)
def test_merging_merges_only_surplus_files(files, readers, size, whole):
    assert merging.untouched(files, readers, 10**6, size) == whole
    groups = -(-(files - whole) // size)
    assert whole + groups <= min(1024, 10**6 // readers) < whole + groups + size


def test_a_bucket_merges_more_than_a_folder():
    """C4's 5,143 files of keys of lines and its 1,024 buckets of hashes. Each opening of a file is a few requests."""
    names = {str(number): "" for number in range(5143)}
    units = {store: len(merging.plan("", names, 1024, store.most_opens)) for store in (LocalStore, ObjectStore)}
    assert units == {LocalStore: 834, ObjectStore: 96}
    for store, merged in units.items():
        size = merging.group_size(5143, 1024, store.most_opens)
        whole = merging.untouched(5143, 1024, store.most_opens, size)
        assert 1024 * (whole + merged) <= store.most_opens


def test_a_build_that_merges_some_files_has_the_same_bytes(config, unmerged, tmp_path, monkeypatch):
    """The first files stay as they are, with the numbers of their units."""
    monkeypatch.setattr(merging, "_MOST_FILES", 3)
    corpus = Path(build(config.model_copy(update={"output": str(tmp_path / "corpus")})))
    assert checksums(corpus) == unmerged
    for stage in ("lines-keys", "minhash-keys", "tokens"):
        assert len(list((corpus / f".stages/{stage}-merged").glob("*.safetensors"))) == 1  # of four, two


@pytest.fixture(scope="module")
def config(small_corpus, tmp_path_factory) -> CorpusConfig:
    """Four files of pages of which many are there twice, and several buckets in every stage."""
    folder = tmp_path_factory.mktemp("merging")
    for part in range(4):
        write_c4(folder / f"c4-{part}.json.gz", records=12, skip=8 * part)
    dedup = {"urls": "newest", "lines": True, "documents": True, "minhash": True, "keys_per_bucket": 100}
    file = write_corpus_file(folder / "corpus.yaml", dedup=dedup, tokenizer=trained(small_corpus))
    return load(file, [], CorpusConfig)


@pytest.fixture(scope="module")
def unmerged(config) -> dict[str, str]:
    return checksums(Path(build(config)))


@pytest.fixture
def grouped(monkeypatch) -> list[int]:
    """The size of groups, to be changed, by which all files are merged."""
    sizes = [1]
    monkeypatch.setattr(merging, "group_size", lambda files, readers, opens: sizes[0])
    for module, bound, number in ((tokens, "BYTES", 1000), (keys, "KEYS", 100), (keys, "DUPLICATES", 10)):
        monkeypatch.setattr(module, f"_{bound}_AT_ONCE", number)  # so that files are merged in several pieces
    return sizes


def test_a_build_with_nothing_to_do_counts_no_tokens(config, unmerged, monkeypatch):
    """Counting reads the hashes of all documents."""
    monkeypatch.setattr(shards, "count_tokens", Mock(side_effect=AssertionError))
    assert checksums(Path(build(config))) == unmerged


def test_a_build_that_merges_has_the_same_bytes(config, unmerged, grouped, capsys):
    """In the directory of the first build: what doesn't depend on how files are merged isn't done again."""
    stages = Path(config.output) / ".stages"
    for size, names in ((2, ["-merged"]), (3, ["-merged"]), (1, [])):
        grouped[0] = size
        assert checksums(Path(build(config))) == unmerged
        found = {path.name for path in stages.glob("*-merged*")}
        steps = [f"{step}-{kind}" for step in ("urls", "lines", "documents") for kind in ("keys", "duplicates")]
        assert found == {of + name for of in (*steps, "minhash-keys", "tokens") for name in names}
        again = [line for line in capsys.readouterr().out.splitlines() if " to do (" in line]
        assert [line for line in again if "-merged" not in line] == []


def test_units_that_read_several_parts_make_the_same_shards(config, unmerged, tmp_path, monkeypatch):
    """Pairs of parts: their documents stand in one file, in the same order. The same documents are dropped, and the
    same ones stay."""
    apart = Path(config.output)

    def rows(corpus: Path) -> list[list[str]]:
        return sorted([*row.values()] for row in dropped_of(corpus))

    assert any(row["kept"] for row in dropped_of(apart))
    monkeypatch.setattr(parts, "_ENOUGH_UNITS", 2)
    corpus = Path(build(config.model_copy(update={"output": str(tmp_path / "corpus")})))
    assert rows(corpus) == rows(apart)
    assert documents_of(corpus) == documents_of(apart)
    found = checksums(corpus)
    files = [name for name in found if name.startswith("documents/")]
    assert len(files) < sum(name.startswith("documents/") for name in unmerged) == 4
    for name in {*found, *unmerged} - {"manifest.json", "lineage.parquet"}:
        assert name.startswith(("documents/", "dropped/")) or found[name] == unmerged[name]
    units = {stage.name: stage.units for stage in report.read(corpus).stages}
    assert units["documents"] == 4
    assert {units[stage] for stage in ("urls-keys", "lines-keys", "minhash-keys", "deduplicated")} == {len(files)}


def test_a_plan_counts_the_units_of_the_build(config, unmerged):
    found = report.read(Path(config.output))
    units = {stage.name: stage.units for stage in found.stages if "-merged" not in stage.name}  # of another test
    stages = [replace(stage, megabytes=60.0, megabytes_per_core_second=1.0) for stage in found.stages]
    small = config.model_copy(update={"ray": config.ray.model_copy(update={"small_bytes": 0})})
    planned = planning.forecast_build(small, replace(found, stages=stages), "", workers=10**6)
    others = [
        stage for stage in planned.stages if stage.name in units and stage.core_seconds
    ]  # no tokenizer is trained
    counted = {stage.name: round(stage.core_seconds / stage.seconds) for stage in others}
    assert counted == {name: number for name, number in units.items() if name != "tokenizer"}
    assert [counted[stage] for stage in ("documents", "lines-keys", "lines-duplicates", "shards")] == [4, 4, 4, 3]


def test_more_keys_get_more_slots_and_too_many_are_refused(config, unmerged, tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_LEAST_SLOTS", 2)
    more = config.model_copy(update={"output": str(tmp_path / "more")})
    assert checksums(Path(build(more))) == unmerged
    with safe_open(tmp_path / "more/.stages/lines-keys/part-00001.safetensors", "numpy") as file:
        slots = len(file.get_tensor("slots")) - 1
    read = sum(
        part.characters for part in parts.parts_of(read_finished(DOCUMENTS_STAGE, LocalStore(tmp_path / "more")))
    )
    assert read > sum(len(one["text"]) for one in documents_of(tmp_path / "more"))
    assert slots / 2 < read / 40 / 100 <= slots  # a line counts as 40 characters at least; 100 keys a bucket
    monkeypatch.setattr(keys, "_MOST_SLOTS", 2)
    told = (
        r"dedup\.keys_per_bucket: 100 of the [\d,]+ keys of lines can't be compared at once in 2 tasks, .*; set it to "
    )
    with pytest.raises(UserError, match=told):
        build(config.model_copy(update={"output": str(tmp_path / "fewer")}))


def test_a_build_that_merges_from_the_start_ends_with_the_same_bytes(config, unmerged, grouped, tmp_path):
    grouped[:] = [2]
    changed = config.model_copy(update={"output": str(tmp_path / "corpus")})
    corpus = Path(build(changed))
    assert checksums(corpus) == unmerged
    told = {stage.name: stage for stage in report.read(corpus).stages}
    assert told["tokens-merged"].units == -(-told["tokens"].units // 2)
    assert told["tokens-merged"].written_megabytes == pytest.approx(told["tokens"].written_megabytes, rel=0.1)

    stages = ("tokens-merged", "lines-duplicates-merged")
    damaged = [corpus / ".stages" / stage / "00001.safetensors" for stage in stages]
    before = [path.read_bytes() for path in damaged]
    flip(damaged[0])
    damaged[1].write_bytes(before[1][:-1])
    build(changed, repair=True)
    assert [path.read_bytes() for path in damaged] == before
    assert checksums(corpus) == unmerged
